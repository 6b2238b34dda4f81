"""Lazy attention matrices in ``outputs.attentions`` of Hugging Face models.

Importing this package registers the attention implementation ``regard``::

    import regard.transformers

    model.set_attn_implementation("regard")
    outputs = model(**inputs, output_attentions=True)
    outputs.attentions[3].entropy()

The model runs its fused kernel, and no matrix is formed.
"""

from regard.transformers.attention_interface import attention_forward, register

__all__ = ["attention_forward", "register"]

register()
