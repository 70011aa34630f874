"""Weights of other libraries, in and out, without importing those libraries.

========================================================= ===========================================================
layout                                                    functions
========================================================= ===========================================================
PyTorch's ``MultiheadAttention``                          `from_torch_attention`, `to_torch_attention`
PyTorch's ``TransformerEncoderLayer``, ``DecoderLayer``   `from_torch_encoder_layer`, `from_torch_decoder_layer`, `to_…`
PyTorch's ``TransformerEncoder``, ``TransformerDecoder``  `from_torch_encoder`, `from_torch_decoder`, `to_…`
PyTorch's ``Transformer``                                 `from_torch_transformer`, `to_torch_transformer`
GPT-2, BERT, Llama in Hugging Face's names                `from_gpt2`, `from_bert`, `from_llama`, `to_…`
Llama in Meta's own names                                 `from_meta_llama`, `to_meta_llama`
attention of Flax, Keras, Equinox                         `from_flax_attention`, … `to_…`
masks of PyTorch's modules                                `mask_from_torch`, `mask_to_torch`
========================================================= ===========================================================

``from_…`` gives ``params`` (NumPy arrays; ``npattn.tree_map(cupy.asarray, params)`` moves them) and ``config``, which has all
that arrays do not say: norm order, eps, activation, rotary positions. ``to_…`` gives ``state`` and ``settings``. Round trips are
exact. A state dict that is not what a function expects is one error, with what is missing, what is left over, and which function
would fit.
"""

from npattn.interop._attention import (
    from_equinox_attention,
    from_flax_attention,
    from_keras_attention,
    to_equinox_attention,
    to_flax_attention,
    to_keras_attention,
)
from npattn.interop._entries import Exported, Imported
from npattn.interop._hugging_face import BertConfig, BertParams, from_bert, from_gpt2, to_bert, to_gpt2
from npattn.interop._llama import from_llama, from_meta_llama, to_llama, to_meta_llama
from npattn.interop._masks import mask_from_torch, mask_to_torch
from npattn.interop._torch import (
    TorchTransformerParams,
    from_torch_attention,
    from_torch_decoder,
    from_torch_decoder_layer,
    from_torch_encoder,
    from_torch_encoder_layer,
    from_torch_transformer,
    to_torch_attention,
    to_torch_decoder,
    to_torch_decoder_layer,
    to_torch_encoder,
    to_torch_encoder_layer,
    to_torch_transformer,
)

__all__ = [
    "BertConfig",
    "BertParams",
    "Exported",
    "Imported",
    "TorchTransformerParams",
    "from_bert",
    "from_equinox_attention",
    "from_flax_attention",
    "from_gpt2",
    "from_keras_attention",
    "from_llama",
    "from_meta_llama",
    "from_torch_attention",
    "from_torch_decoder",
    "from_torch_decoder_layer",
    "from_torch_encoder",
    "from_torch_encoder_layer",
    "from_torch_transformer",
    "mask_from_torch",
    "mask_to_torch",
    "to_bert",
    "to_equinox_attention",
    "to_flax_attention",
    "to_gpt2",
    "to_keras_attention",
    "to_llama",
    "to_meta_llama",
    "to_torch_attention",
    "to_torch_decoder",
    "to_torch_decoder_layer",
    "to_torch_encoder",
    "to_torch_encoder_layer",
    "to_torch_transformer",
]
