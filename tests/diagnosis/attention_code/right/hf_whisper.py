# regard.check(WhisperAttention(32, 4, config=config))
# regard.spec(causal=False,heads=4,positions=None,padding={"attention_mask":"added to the scores"})
from transformers import WhisperConfig
from transformers.models.whisper.modeling_whisper import WhisperAttention

config = WhisperConfig(d_model=32, encoder_attention_heads=4, decoder_attention_heads=4)
config._attn_implementation = "sdpa"
