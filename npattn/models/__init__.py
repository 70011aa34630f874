"""Blocks, stacks and models: composites of layers and attention, each in three functions. They contain no calculus.

=================================================== ========================================================= ====================
model                                               what it gives                                             gradients
=================================================== ========================================================= ====================
``encoder_block(params, x)``                        self-attention and a feed-forward network                 dparams, dx, dbias
``decoder_block(params, x, memory)``                the same with cross-attention between                     and dmemory
``encoder(params, x)``                              encoder blocks, and a last norm                           dparams, dx, dbias
``decoder(params, x, memory)``                      decoder blocks, and a last norm                           and dmemory
``token_embedding(params, ids)``                    (..., T) → (..., T, C), with positions                    dparams
``language_model(params, ids)``                     (..., T) → logits (..., T, V), decoder-only               dparams, dbias
``language_model_loss(params, ids, targets)``       its mean cross-entropy                                    dparams, dbias
``encoder_decoder(params, source, target)``         (..., S), (..., T) → logits (..., T, V)                   dparams
``encoder_decoder_loss(params, ..., targets)``      its mean cross-entropy                                    dparams
``language_model_step(params, ids, cache)``         logits, with what was read before in a `KeyValueCache`    none
``encoder_decoder_step(params, ids, cache)``        the same of a target, after `encoder_decoder_start`       none
``generate(params, prompts, count=...)``            tokens that follow                                        none
``beam_search(params, source, ...)``                the best targets of a source                              none
=================================================== ========================================================= ====================

Parameters are trees of NamedTuples (``EncoderParams.init(rng, ...)``), and their gradient ``grads.dparams`` is a tree of the same
type. What is not an array stands in a frozen config beside them: `BlockConfig` for blocks and stacks, `LanguageModelConfig`,
`EncoderDecoderConfig`. Every layer can be opened from what forward saved: ``saved.block(n).attention`` is what
`npattn.multi_head_attention_steps` shows.
"""

from npattn.models.cache import KeyValueCache
from npattn.models.config import BlockConfig, EmbeddingConfig, EncoderDecoderConfig, LanguageModelConfig
from npattn.models.decoder import DecoderGrads, DecoderParams, DecoderSaved, decoder, decoder_backward, decoder_forward
from npattn.models.decoder_block import (
    DecoderBlockGrads,
    DecoderBlockParams,
    DecoderBlockSaved,
    decoder_block,
    decoder_block_backward,
    decoder_block_forward,
)
from npattn.models.decoding import EncoderDecoderCache, encoder_decoder_start, encoder_decoder_step, language_model_step
from npattn.models.encoder import EncoderGrads, EncoderParams, EncoderSaved, encoder, encoder_backward, encoder_forward
from npattn.models.encoder_block import (
    EncoderBlockGrads,
    EncoderBlockParams,
    EncoderBlockSaved,
    encoder_block,
    encoder_block_backward,
    encoder_block_forward,
)
from npattn.models.encoder_decoder import (
    EncoderDecoderGrads,
    EncoderDecoderLossSaved,
    EncoderDecoderParams,
    EncoderDecoderSaved,
    encoder_decoder,
    encoder_decoder_backward,
    encoder_decoder_forward,
    encoder_decoder_loss,
    encoder_decoder_loss_backward,
    encoder_decoder_loss_forward,
)
from npattn.models.encoder_jvp import encoder_backward_jvp, encoder_block_backward_jvp, encoder_block_jvp, encoder_jvp
from npattn.models.generate import BeamSearchResult, beam_search, generate
from npattn.models.language_model import (
    LanguageModelGrads,
    LanguageModelLossSaved,
    LanguageModelParams,
    LanguageModelSaved,
    language_model,
    language_model_backward,
    language_model_forward,
    language_model_loss,
    language_model_loss_backward,
    language_model_loss_forward,
)
from npattn.models.language_model_jvp import (
    language_model_backward_jvp,
    language_model_jvp,
    language_model_loss_hvp,
    language_model_loss_jvp,
)
from npattn.models.norm import NormParams
from npattn.models.token_embedding import (
    TokenEmbeddingGrads,
    TokenEmbeddingParams,
    TokenEmbeddingSaved,
    token_embedding,
    token_embedding_backward,
    token_embedding_forward,
)

__all__ = [
    "BeamSearchResult",
    "BlockConfig",
    "DecoderBlockGrads",
    "DecoderBlockParams",
    "DecoderBlockSaved",
    "DecoderGrads",
    "DecoderParams",
    "DecoderSaved",
    "EmbeddingConfig",
    "EncoderBlockGrads",
    "EncoderBlockParams",
    "EncoderBlockSaved",
    "EncoderDecoderCache",
    "EncoderDecoderConfig",
    "EncoderDecoderGrads",
    "EncoderDecoderLossSaved",
    "EncoderDecoderParams",
    "EncoderDecoderSaved",
    "EncoderGrads",
    "EncoderParams",
    "EncoderSaved",
    "KeyValueCache",
    "LanguageModelConfig",
    "LanguageModelGrads",
    "LanguageModelLossSaved",
    "LanguageModelParams",
    "LanguageModelSaved",
    "NormParams",
    "TokenEmbeddingGrads",
    "TokenEmbeddingParams",
    "TokenEmbeddingSaved",
    "beam_search",
    "decoder",
    "decoder_backward",
    "decoder_block",
    "decoder_block_backward",
    "decoder_block_forward",
    "decoder_forward",
    "encoder",
    "encoder_backward",
    "encoder_backward_jvp",
    "encoder_block",
    "encoder_block_backward",
    "encoder_block_backward_jvp",
    "encoder_block_forward",
    "encoder_block_jvp",
    "encoder_decoder",
    "encoder_decoder_backward",
    "encoder_decoder_forward",
    "encoder_decoder_loss",
    "encoder_decoder_loss_backward",
    "encoder_decoder_loss_forward",
    "encoder_decoder_start",
    "encoder_decoder_step",
    "encoder_forward",
    "encoder_jvp",
    "generate",
    "language_model",
    "language_model_backward",
    "language_model_backward_jvp",
    "language_model_forward",
    "language_model_jvp",
    "language_model_loss",
    "language_model_loss_backward",
    "language_model_loss_forward",
    "language_model_loss_hvp",
    "language_model_loss_jvp",
    "language_model_step",
    "token_embedding",
    "token_embedding_backward",
    "token_embedding_forward",
]
