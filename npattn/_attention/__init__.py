"""The formula, who may look at whom, how it is organised, and what a caller sees (docs/design names each file's question)."""
