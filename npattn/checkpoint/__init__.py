"""Parameters, configs and optimiser states as files: ``.npz``, which `numpy.load` opens too, or ``.safetensors``.

Arrays have names such as ``blocks.0.attention.w_q``; what is not an array stands beside them as JSON. Nothing is ever unpickled.
A file is whole or it is not there: it is written under another name and then renamed. A file that is damaged, cut off or foreign
is one `CheckpointError`, and so is one that does not fit what it is loaded for.
"""

from npattn.checkpoint._errors import CheckpointError
from npattn.checkpoint._safetensors import read_safetensors
from npattn.checkpoint._save import Checkpoint, load, save

__all__ = ["Checkpoint", "CheckpointError", "load", "read_safetensors", "save"]
