"""Save and load: trees to files, files to trees."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from npattn._arrays.namespace import Namespace
from npattn._arrays.trees import tree_repr
from npattn.checkpoint import _npz, _safetensors
from npattn.checkpoint._errors import CheckpointError, reading
from npattn.checkpoint._files import write_atomically
from npattn.checkpoint._tree import Stored, array_entries, fill, from_json, restore, to_json

_FORMATS: dict[str, Any] = {".npz": _npz, ".safetensors": _safetensors}
_PARTS = ("params", "config", "state", "notes")


class Checkpoint(NamedTuple):
    """What a file held; ``None`` where nothing was saved."""

    params: Any
    config: Any = None
    state: Any = None
    notes: Any = None

    def __repr__(self) -> str:
        return tree_repr(self)


def save(
    path: str | os.PathLike[str], params: Any, /, *, config: Any = None, state: Any = None, notes: dict[str, Any] | None = None
) -> None:
    """Write parameters, and what belongs to them, to a file.

    Parameters
    ----------
    path : path
        Ends in ``.npz`` or ``.safetensors``, which says the format.
    params : tree
        NamedTuples, tuples, lists and dicts with arrays of any library as leaves.
    config : optional
        The model's config.
    state : optional
        The optimiser's state.
    notes : dict, optional
        Numbers, texts and lists of them under names: the seed, losses, an alphabet.

    Raises
    ------
    ValueError
        If the path ends in something else, or two arrays would have one name.
    TypeError
        If something is not an array, a number, a text, or a container of them.
    OSError
        If the file cannot be written.

    Notes
    -----
    The file is written under another name, ``.NAME.PID-N.part``, brought to the disk, and renamed: a crash at any moment leaves
    the file that was there before. Arrays have the names of their places, ``blocks.0.attention.w_q``; those of the state begin
    with ``state.``. ``.npz`` is what `numpy.load` opens, safetensors what the library of this name opens; neither is needed.
    Equal contents give equal bytes.

    Examples
    --------
    >>> import numpy as np, tempfile, pathlib
    >>> from npattn import checkpoint
    >>> from npattn.models import BlockConfig, EncoderBlockParams
    >>> from npattn.optim import Adam
    >>> params = EncoderBlockParams.init(np.random.default_rng(0), width=8, heads=2)
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     path = pathlib.Path(folder) / "block.npz"
    ...     checkpoint.save(path, params, config=BlockConfig("post"), state=Adam().init(params), notes={"seed": 7})
    ...     loaded = checkpoint.load(path)
    >>> loaded.config.norm_order, loaded.state.step, loaded.notes, type(loaded.params).__name__
    ('post', 0, {'seed': 7}, 'EncoderBlockParams')
    """
    op, target = "checkpoint.save", Path(path)
    kind = _format(op, target)
    arrays: dict[str, Stored] = {}
    prefixes = {"params": "", "config": "config", "state": "state", "notes": "notes"}
    parts = zip(_PARTS, (params, config, state, notes), strict=True)
    structure = {part: to_json(op, tree, prefixes[part], arrays) for part, tree in parts}
    write_atomically(target, lambda file: kind.write(file, structure, arrays))


def load(path: str | os.PathLike[str], /, *, like: Any = None, xp: Namespace = np, device: Any = None) -> Checkpoint:
    """Read what `save` wrote: all of it, or an error and nothing.

    Parameters
    ----------
    path : path
        Of the file.
    like : tree, optional
        Parameters that the file's must fit: the same names, shapes and dtypes. Their types become those of the result, which may
        be NamedTuples of your own; without it they must be npattn's.
    xp : namespace, optional
        The library of the arrays.
    device : device, optional
        For libraries with devices.

    Returns
    -------
    Checkpoint
        ``params``, ``config``, ``state`` and ``notes``. bfloat16 becomes float32 in a library that has none.

    Raises
    ------
    CheckpointError
        If the file is damaged, cut off or foreign, or does not fit; one error names all that is missing, left over or of another
        shape.
    OSError
        If the file cannot be read.

    Notes
    -----
    Nothing is unpickled, and nothing is allocated that is larger than the file.

    Examples
    --------
    See `save`.
    """
    op, source = "checkpoint.load", Path(path)
    kind = _format(op, source)
    with reading(op, source), source.open("rb") as file:
        structure, stored = kind.read(op, source, file)
        if not isinstance(structure, dict) or set(structure) != set(_PARTS):
            raise ValueError(f"it has no {', '.join(_PARTS)}")
        arrays = {name: restore(one, xp=xp, device=device) for name, one in stored.items()}
        try:
            rest = [from_json(structure[part], arrays) for part in _PARTS[1:]]
            own = {name: arrays[name] for name in array_entries(structure["params"])}
            params = from_json(structure["params"], arrays) if like is None else fill(like, own)
        except CheckpointError as error:
            raise CheckpointError(f"{op}: {source}: {error}") from None
    return Checkpoint(params, *rest)


def _format(op: str, path: Path) -> Any:
    if path.suffix not in _FORMATS:
        raise ValueError(f"{op}: the path must end in {' or '.join(_FORMATS)}, got {path.name}")
    return _FORMATS[path.suffix]
