# regard.check(WhisperAttention(32, 4, config=config))
from transformers import WhisperConfig
from transformers.models.whisper.modeling_whisper import WhisperAttention

config = WhisperConfig(d_model=32, encoder_attention_heads=4, decoder_attention_heads=4)
config._attn_implementation = "sdpa"
