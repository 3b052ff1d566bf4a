"""The diagnoses, as the engine spells them: the one place to edit when a slug is renamed."""

from typing import Final

LOG_ZERO: Final = "log_zero"
DIV_ZERO: Final = "div_zero"
SQRT_ZERO: Final = "sqrt_zero"
MASKED_ROW: Final = "masked_row"
FP16_OVERFLOW: Final = "fp16_overflow"
BF16_OVERFLOW: Final = "bf16_overflow"
EPS_ZERO: Final = "eps_zero"
CLIP_INF: Final = "clip_inf"
LR_TOO_HIGH: Final = "lr_too_high"
ADAM_EPS: Final = "adam_eps_zero"
CTC: Final = "infeasible_ctc"
BAD_ROW: Final = "bad_data_row"
BAD_EMBEDDING: Final = "bad_embedding_row"
