
"use strict";
// The page computes nothing of attention. Numbers arrive as four digits and an exponent; they are looked up, written out and
// coloured. What is said about a cell is a recipe of npattn/_attention/recipes.py with its gaps filled.

const byId = (id) => document.getElementById(id);

function make(kind, properties = {}, ...children) {
  const element = Object.assign(document.createElement(kind), properties);
  element.append(...children); // strings become text, never markup
  return element;
}

async function unpack(text) {
  const deflated = Uint8Array.from(atob(text), (character) => character.charCodeAt(0));
  const stream = new Blob([deflated]).stream().pipeThrough(new DecompressionStream("deflate"));
  return new Uint8Array(await new Response(stream).arrayBuffer());
}

// A number as npattn prints it, from its sign and exponent in one code, and its digits
function printed(code, digits) {
  if (code < 5) return ["0", "-0", "inf", "-inf", "nan"][code];
  const sign = (code - 5) % 2 ? "-" : "", exponent = ((code - 5) >> 1) - 400;
  const point = (whole, rest) => sign + whole + (rest.replace(/0+$/, "") && "." + rest.replace(/0+$/, ""));
  if (exponent < -4 || exponent > 3) {
    const size = String(Math.abs(exponent)).padStart(2, "0");
    return point(digits[0], digits.slice(1)) + (exponent < 0 ? "e-" : "e+") + size;
  }
  if (exponent < 0) return point("0", "0".repeat(-1 - exponent) + digits);
  return point(digits.slice(0, exponent + 1), digits.slice(exponent + 1));
}

function start(data, bytes) {
  const shares = ["weights", "dropped"]; // never negative
  const masked = ["biased", "weights", "dropped", "dbiased", "dcapped", "dscores"]; // where hidden pairs show
  const ofFeatures = ["q", "k", "v", "out", "dout", "dq", "dk", "dv"]; // a column a feature, not a key
  const ofKeys = ["k", "v", "dk", "dv"]; // a row a key, not a query
  const state = {
    choices: data.choices.map((choice) => choice.of_run[0]),
    layer: 0, entry: 0, head: 0, step: "weights", query: data.start[0], key: data.start[1], feature: 0,
  };
  const forward = data.steps.filter((name) => data.forward.includes(name));
  const backward = data.steps.filter((name) => !data.forward.includes(name));
  let grid = { made: "" };

  // Numbers -----------------------------------------------------------------------------------------------------------------

  const run = () => data.runs.find((_, n) => data.choices.every((choice, c) => choice.of_run[n] === state.choices[c]));
  const layer = () => run()[state.layer];
  const heads = () => layer().outer.at(-1) ?? 1;
  const entries = () => layer().outer.slice(0, -1).reduce((a, b) => a * b, 1);
  const group = () => state.entry * heads() + state.head; // the leading index and head as one number

  function read(block, at) {
    if (block.kind === "flags") return bytes[4 * data.count + block.at + at];
    if (block.kind === "hidden") return read(data.blocks[block.where], at) ? "-inf" : read(data.blocks[block.shown], at);
    const plane = (n) => bytes[n * data.count + block.at + at];
    return printed(plane(0) + 256 * plane(1), String(1000 + 256 * plane(2) + plane(3)));
  }

  // A number as text, or a flag, of the part of a table that this leading index and head use
  function number(name, g, i, j) {
    const table = layer().tables[name], block = data.blocks[table.block], [, rows, columns] = block.shape;
    return read(block, (table.own[g] * rows + i) * columns + (columns === 1 ? 0 : j));
  }

  const sizes = (name) => data.blocks[layer().tables[name].block].shape.slice(1);

  // Words -------------------------------------------------------------------------------------------------------------------

  const recipeOf = (name, g, i, j) => layer().recipes[name]?.find((recipe) => !recipe.when || number(recipe.when, g, i, j));

  function terms(name, sum, g, i, j) {
    const used = sum.sharers ? sum.sharers[layer().tables[name].own[g]] : [g];
    const shown = [];
    for (let n = 0; n < sum.shown; n++) {
      const at = { i, j, n: n % sum.length };
      const [left, right] = [sum.left, sum.right].map(([array, row, column]) =>
        number(array, used[Math.floor(n / sum.length)], at[row], at[column]));
      const signed = right === "nan" || (right[0] === "-" && right !== "-0");
      shown.push(`${left}*${signed ? `(${right})` : right}`);
    }
    if (sum.rest) shown.push(sum.rest);
    return shown.length ? `(${shown.join(" + ")})` : "(nothing)";
  }

  function fill(text, name, recipe, g, i, j) {
    return text.replace(/\{(\w+)\}/g, (_, gap) => {
      if (gap === "i") return i;
      if (gap === "j") return j;
      if (gap === "sum") return terms(name, recipe.sum, g, i, j);
      if (gap === "reason") return fill(layer().reasons[number("masked", g, i, j) - 1], name, recipe, g, i, j);
      return layer().numbers[gap] ?? number(gap, g, i, j);
    });
  }

  function explain(name, g, i, j) {
    const label = `${name}[${i}, ${j}]`, value = number(name, g, i, j), recipe = recipeOf(name, g, i, j);
    if (!recipe) return `${label} = ${value}`;
    const [letters, numbers] = [recipe.letters, recipe.numbers].map((text) => fill(text, name, recipe, g, i, j));
    return `${label} = ${letters}\n${" ".repeat(label.length)} = ${numbers} = ${value}`;
  }

  // The cells that a cell was made from: of a sum those of its first term
  function sources(name, g, i, j) {
    const recipe = recipeOf(name, g, i, j), at = { i, j, n: 0 };
    if (!recipe) return [];
    const cells = [...recipe.numbers.matchAll(/\{(\w+)\}/g)].map(([, gap]) => [gap, "i", "j"]);
    return [...(recipe.sum ? [recipe.sum.left, recipe.sum.right] : []), ...cells]
      .filter(([array]) => data.steps.includes(array))
      .map(([array, row, column]) => [array, at[row], at[column]]);
  }

  // The step that this one repeats, if it does nothing in this run
  function repeated(name) {
    const recipes = layer().recipes[name];
    const before = recipes?.length === 1 && /^\{(\w+)\}$/.exec(recipes[0].numbers);
    return before && data.steps.includes(before[1]) ? before[1] : "";
  }

  const isHidden = (name, g, i, j) =>
    (masked.includes(name) && number("biased", g, i, j) === "-inf") ||
    (["out", "dq"].includes(name) && number("blind", g, i, 0) !== 0);

  // What is chosen ----------------------------------------------------------------------------------------------------------

  const rowOf = (name) => (ofKeys.includes(name) ? "key" : "query");
  const columnOf = (name) => (ofFeatures.includes(name) ? "feature" : "key");
  const chosen = () => [state[rowOf(state.step)], state[columnOf(state.step)]];

  function choose(i, j, name = state.step) {
    state[rowOf(name)] = i;
    state[columnOf(name)] = j;
  }

  function keepInside() {
    state.layer = Math.min(state.layer, run().length - 1);
    state.head = Math.min(state.head, heads() - 1);
    state.entry = Math.min(state.entry, entries() - 1);
    const [queries, keys] = data.tokens[state.layer];
    state.query = Math.min(state.query, queries.length - 1);
    state.key = Math.min(state.key, keys.length - 1);
    if (columnOf(state.step) === "feature") state.feature = Math.max(0, Math.min(state.feature, sizes(state.step)[1] - 1));
  }

  // The run with this value of one choice that agrees most in the others
  function switchTo(c, value) {
    const agreement = (of) => of.filter((v, n) => v === state.choices[n]).length;
    state.choices = data.runs
      .map((_, n) => data.choices.map((choice) => choice.of_run[n]))
      .filter((of) => of[c] === value)
      .reduce((best, of) => (agreement(of) > agreement(best) ? of : best));
    draw();
  }

  // Drawing -----------------------------------------------------------------------------------------------------------------

  function draw() {
    keepInside();
    drawChoices();
    drawTokens();
    markSteps();
    drawMatrix();
  }

  function drawChoices() {
    const form = byId("choices"), focused = document.activeElement, focus = form.contains(focused) && focused.id;
    form.replaceChildren(...data.choices.map((choice, c) => {
      const radios = choice.values.map((value, n) => {
        const checked = state.choices[c] === n;
        const input = make("input", { type: "radio", id: `choice-${c}-${n}`, name: `choice-${c}`, checked });
        input.addEventListener("change", () => switchTo(c, n));
        return make("label", {}, input, ` ${value}`);
      });
      return make("fieldset", {}, make("legend", { textContent: choice.name }), make("div", {}, ...radios));
    }));
    for (const [name, count, title] of [["layer", run().length], ["entry", entries(), "entry of the batch"], ["head", heads()]]) {
      if (count < 2) continue;
      const options = Array.from({ length: count }, (_, n) => make("option", { value: n, textContent: n, selected: n === state[name] }));
      const select = make("select", { id: name }, ...options);
      select.addEventListener("change", () => { state[name] = select.selectedIndex; draw(); });
      form.append(make("label", {}, make("span", { textContent: title ?? name }), select));
    }
    if (focus) byId(focus)?.focus();
  }

  function drawTokens() {
    const [queries, keys] = data.tokens[state.layer];
    byId("queries").replaceChildren(...queries.map((text, i) => {
      const button = make("button", { type: "button", className: "token", textContent: text, title: `query ${i}: ${text}` });
      button.addEventListener("mouseenter", () => drawKeys(i));
      button.addEventListener("mouseleave", () => drawKeys(state.query));
      button.addEventListener("click", () => chooseQuery(i));
      return button;
    }));
    byId("keys").replaceChildren(...keys.map((text, j) => {
      const item = make("span", { title: `key ${j}: ${text}` }, make("span", { className: "token", textContent: text }), make("small"));
      item.setAttribute("role", "listitem");
      return item;
    }));
    markQuery();
  }

  function chooseQuery(i) {
    state.query = i;
    markQuery();
    markCell();
  }

  function markQuery() {
    [...byId("queries").children].forEach((button, i) => {
      button.setAttribute("aria-pressed", i === state.query);
      button.tabIndex = i === state.query ? 0 : -1;
    });
    drawKeys(state.query);
  }

  function drawKeys(i) {
    [...byId("keys").children].forEach((item, j) => {
      item.lastChild.textContent = number("weights", group(), i, j);
      paint(item, "weights", i, j);
    });
  }

  function paint(element, name, i, j) {
    const text = number(name, group(), i, j);
    colour(element, name, text);
    element.classList.toggle("odd", text === "nan" || text === "inf");
    element.classList.toggle("hidden", isHidden(name, group(), i, j));
  }

  // Colour grows with the root of a number: in even steps most weights and gradients would look like 0
  function colour(element, name, text) {
    const value = Number(text), limit = Number(data.marks[state.layer][name].at(-1));
    const size = Number.isFinite(value) && limit > 0 ? Math.min(Math.abs(value) / limit, 1) : 0;
    element.style.setProperty("--part", Math.round(100 * Math.sqrt(size)));
    element.classList.toggle("less", value < 0);
    element.classList.toggle("share", shares.includes(name));
  }

  function makeSteps() {
    for (const [id, names] of [["forward", forward], ["backward", backward]]) {
      byId(id).replaceChildren(...names.map((name) => {
        const button = make("button", { type: "button", textContent: name });
        button.addEventListener("click", () => go(name));
        return button;
      }));
    }
    byId("backward-side").hidden = !backward.length;
    for (const [id, by] of [["previous", -1], ["next", 1]]) byId(id).addEventListener("click", () => move(by));
  }

  function markSteps() {
    for (const [id, names] of [["forward", forward], ["backward", backward]]) {
      [...byId(id).children].forEach((button, n) => {
        const here = names[n] === state.step, same = repeated(names[n]);
        button.setAttribute("aria-current", here ? "step" : "false");
        button.tabIndex = here || (n === 0 && !names.includes(state.step)) ? 0 : -1;
        button.className = same ? "repeats" : "";
        button.title = same ? `the same as ${same} here` : "";
      });
    }
    byId("previous").setAttribute("aria-disabled", state.step === data.steps.at(0));
    byId("next").setAttribute("aria-disabled", state.step === data.steps.at(-1));
  }

  function move(by) {
    const to = data.steps[data.steps.indexOf(state.step) + by];
    if (to) go(to);
  }

  function go(name) {
    state.step = name;
    keepInside();
    markSteps();
    drawMatrix();
  }

  function drawMatrix() {
    const name = state.step, [rows, columns] = sizes(name), whole = layer().whole[name], g = group();
    const [queries, keys] = data.tokens[state.layer];
    const numbered = Array.from({ length: columns }, (_, n) => String(n));
    buildGrid(rowOf(name) === "key" ? keys : queries, columnOf(name) === "key" ? keys : numbered);
    grid.cells.forEach((line, i) => line.forEach((cell, j) => {
      paint(cell, name, i, j);
      cell.textContent = grid.written ? number(name, g, i, j) : "";
    }));
    byId("step").textContent = name;
    byId("formula").textContent = data.formulas[name];
    byId("note").textContent = [
      `${rows} \u00d7 ${whole[1]}`,
      columns < whole[1] ? `features 0 to ${columns - 1} are shown` : "",
      repeated(name) ? `the same as ${repeated(name)} here` : "",
      sharing(name, g),
    ].filter(Boolean).join("; ");
    drawLegend(name);
    markCell();
  }

  function sharing(name, g) {
    const { own } = layer().tables[name], same = own.flatMap((part, n) => (part === own[g] ? [n] : []));
    if (same.length < 2) return "";
    const within = same.every((n) => Math.floor(n / heads()) === state.entry);
    return within ? `shared by heads ${same.map((n) => n % heads()).join(", ")}` : "shared by entries of the batch";
  }

  function buildGrid(rows, columns) {
    const made = JSON.stringify([rows, columns]);
    if (grid.made === made) return;
    const written = columns.length <= 16;
    const heading = (text, scope) => make("th", { scope, title: text }, make("span", { className: "token", textContent: text }));
    const cells = rows.map(() => columns.map(() => make("td", { tabIndex: -1 })));
    const head = make("thead", {}, make("tr", {}, make("th"), ...columns.map((text) => heading(text, "col"))));
    const body = make("tbody", {}, ...cells.map((line, i) => make("tr", {}, heading(rows[i], "row"), ...line)));
    const table = make("table", { className: written ? "wide" : "narrow" }, head, body);
    table.setAttribute("role", "grid");
    byId("matrix").replaceChildren(table);
    grid = { made, written, table, cells, rows, columns };
  }

  function drawLegend(name) {
    const marks = data.marks[state.layer][name].map((text) => {
      const mark = make("span", { className: "mark" }, text);
      colour(mark, name, text);
      return mark;
    });
    byId("legend").replaceChildren(make("span", { className: "marks" }, ...marks));
    byId("legend").append(` the same colours for all heads${data.runs.length > 1 ? " and runs" : ""}`);
    if (grid.table.querySelector(".hidden")) {
      byId("legend").append(" \u00a0 ", make("span", { className: "hatch" }), " hidden by the mask or a bias");
    }
  }

  function chooseCell(i, j) {
    if (!grid.cells[i]?.[j]) return;
    choose(i, j);
    markQuery();
    markCell();
    grid.cells[i][j].focus();
  }

  function markCell() {
    const name = state.step, g = group(), [i, j] = chosen(), cell = grid.cells[i]?.[j];
    for (const old of grid.table.querySelectorAll(".chosen")) {
      old.classList.remove("chosen");
      if (old.matches("td")) old.tabIndex = -1;
    }
    byId("pair").replaceChildren();
    byId("explanation").textContent = cell ? explain(name, g, i, j) : "";
    if (!cell) return; // a matrix without columns
    cell.tabIndex = 0;
    for (const marked of [cell, cell.parentElement.cells[0], grid.table.tHead.rows[0].cells[j + 1]]) marked.classList.add("chosen");
    cell.setAttribute("aria-label", `${grid.rows[i]}, ${grid.columns[j]}: ${number(name, g, i, j)}`);
    reveal(cell);
    const [row, column] = [grid.rows[i], grid.columns[j]].map((text) => make("bdi", { className: "token", textContent: text }));
    byId("pair").append(row, make("span", { textContent: columnOf(name) === "key" ? "reads" : "at feature" }), column);
    const from = sources(name, g, i, j).map(([step, to_i, to_j]) => {
      const button = make("button", { type: "button", textContent: `${step}[${to_i}, ${to_j}]` });
      button.addEventListener("click", () => {
        choose(to_i, to_j, step);
        go(step);
        chooseCell(...chosen()); // this button is gone, and the focus must be somewhere
      });
      return button;
    });
    if (from.length) byId("pair").append(make("span", { id: "sources" }, "made from ", ...from));
  }

  // Scroll the matrix, not the page
  function reveal(cell) {
    const box = byId("matrix"), head = grid.table.tHead.offsetHeight, side = cell.parentElement.cells[0].offsetWidth;
    const inside = (from, at, size, start, length) =>
      at - start < from ? at - start : at + size > from + length ? at + size - length : from;
    box.scrollTop = inside(box.scrollTop, cell.offsetTop, cell.offsetHeight, head, box.clientHeight);
    box.scrollLeft = inside(box.scrollLeft, cell.offsetLeft, cell.offsetWidth, side, box.clientWidth);
  }

  // Keys --------------------------------------------------------------------------------------------------------------------

  function walk(id, act) {
    byId(id).addEventListener("keydown", (event) => {
      const buttons = [...byId(id).children], at = buttons.indexOf(document.activeElement);
      const to = { ArrowLeft: at - 1, ArrowRight: at + 1, Home: 0, End: buttons.length - 1 }[event.key];
      if (!buttons[to]) return;
      event.preventDefault();
      act(to);
      byId(id).children[to].focus();
    });
  }

  walk("queries", chooseQuery);
  walk("forward", (n) => go(forward[n]));
  walk("backward", (n) => go(backward[n]));
  const cellAt = (event) => {
    const cell = event.target.closest("tbody td");
    return cell && [cell.parentElement.rowIndex - 1, cell.cellIndex - 1];
  };
  byId("matrix").addEventListener("click", (event) => chooseCell(...(cellAt(event) ?? [])));
  byId("matrix").addEventListener("mouseover", (event) => {
    const [i, j] = cellAt(event) ?? [];
    if (i !== undefined) event.target.title = `${grid.rows[i]}, ${grid.columns[j]}: ${number(state.step, group(), i, j)}`;
  });
  byId("matrix").addEventListener("keydown", (event) => {
    const [i, j] = chosen(), end = grid.columns.length - 1;
    const to = {
      ArrowLeft: [i, j - 1], ArrowRight: [i, j + 1], ArrowUp: [i - 1, j], ArrowDown: [i + 1, j], Home: [i, 0], End: [i, end],
    }[event.key];
    if (!to) return;
    event.preventDefault();
    chooseCell(...to);
  });
  byId("choices").addEventListener("submit", (event) => event.preventDefault());
  makeSteps();
  draw();
}

(async () => {
  try {
    if (!("DecompressionStream" in window)) throw new Error("it needs a browser of 2023 or newer");
    start(JSON.parse(byId("data").textContent), await unpack(byId("numbers").textContent));
  } catch (error) {
    byId("trouble").hidden = false;
    byId("trouble").textContent = `The page cannot be shown: ${error.message}`;
    throw error;
  }
})();
