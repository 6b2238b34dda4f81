"""Lazy attention matrices in ``outputs.attentions`` of Hugging Face models.

The model keeps its own attention implementation::

    from regard.transformers import lazy

    with lazy(model):
        outputs = model(**inputs, output_attentions=True)
    outputs.attentions[3].entropy()

No bit of the model's outputs changes, and no matrix is formed.
"""

from regard.transformers.lazy_models import Lazy, lazy

__all__ = ["Lazy", "lazy"]
