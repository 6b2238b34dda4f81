"""`locate`: measure which part of a picture each token of a model stands for.

Attention mixes tokens. Without the outputs of its attention, each token of a model depends on its
own part of the picture only. Gradients say which part, and changed pixels verify it in all layers.
"""

import warnings
from collections.abc import Generator, Sequence
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from regard.capture.observer import observe
from regard.errors import RefusedWarning, RegardError, kind_text
from regard.images.lattice import Spot, lattices
from regard.images.patch_grid import Grid
from regard.images.probe_pictures import Inputs, Places, Prepare, places_of
from regard.recording.recording import Recording

if TYPE_CHECKING:
    from PIL.Image import Image

_PROBES = 4  # random parts of the pictures that are changed to compare layers
_CERTAIN = 0.25  # of a token's numbers: if a probe changes that many, its value must change
_ZERO = 1e-6  # of the largest gradient: smaller ones are rounding
_MOST_FIELDS = 1024  # tokens whose overlapping fields are measured one by one

_BY_HAND = (
    "    Give the tokens their places: "
    "seen.with_pictures(pictures, regard.grid(tokens=range(1, 197), rows=14, columns=14))."
)


def locate(
    model: nn.Module, prepare: Prepare, pictures: "Sequence[Image]"
) -> dict[str, tuple[Grid, ...]]:
    """Measure which part of a picture each token of a model stands for.

    Nothing is read from the kind of the model. Probe pictures say where each number of the model's
    inputs comes from: they follow every resize, crop, padding and tile of the processor. Then the
    model runs without the outputs of its attention, and gradients say which numbers each token
    depends on. Last, random parts of the pictures are changed: exactly the keys of the tokens
    there must change, in every layer.

    It takes some runs of the processor, and some of the model.

    Args:
        model: the model, in evaluation mode, with floating-point weights.
        prepare: the function that makes the inputs of the model from a list of pictures: a mapping,
            a tensor or a tuple. It keeps the text and every option of the processor.
        pictures: the pictures, as images of Pillow.

    Returns:
        For the name of each layer whose keys stand for parts of pictures, its grids. The boxes of
        tokens whose fields overlap, as behind several convolutions, are centred in their fields. A
        token of several pictures, such as two frames of a video, has the place of the first.

    Raises:
        TypeError: pictures are not a list of images.
        RegardError: no layer has keys that stand for parts of a picture, or the places cannot be
            measured.

    Example:
        >>> import torch, regard, regard.nn
        >>> from PIL import Image
        >>> class Small(torch.nn.Module):
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.patches = torch.nn.Conv2d(3, 8, kernel_size=16, stride=16)
        ...         self.attention = regard.nn.SelfAttention(8, num_heads=2)
        ...     def forward(self, pixels):
        ...         return self.attention(self.patches(pixels).flatten(2).mT)
        >>> def prepare(pictures):
        ...     pixels = [torch.tensor(list(each.tobytes())) for each in pictures]
        ...     return torch.stack(pixels).view(-1, 32, 48, 3).permute(0, 3, 1, 2) / 255
        >>> model, photo = Small().eval(), Image.new("RGB", (48, 32))
        >>> regard.locate(model, prepare, [photo])["attention"][0].boxes(48, 32)[1]
        tensor([16.,  0., 32., 16.])
    """
    if isinstance(pictures, str) or not isinstance(pictures, Sequence) or not pictures:
        raise TypeError(
            f"pictures is {kind_text(pictures)}; it must be a list of images of Pillow.\n"
            "    Pass for example [regard.images.decode(path)]."
        )
    if model.training:
        raise RegardError(
            "model is in training mode, in which it answers differently each time.\n"
            "    Call model.eval() first."
        )
    inputs, places = places_of(prepare, pictures)
    measure = _Measure(model, inputs, places, [picture.size for picture in pictures])
    grids = measure.grids()
    if not grids:
        raise RegardError(
            "no layer of the model has keys that stand for parts of a picture: each depends on the "
            f"whole picture, on none of it, or was not recorded with query and key.\n{_BY_HAND}"
        )
    return grids


class _StopError(Exception):
    """Ends a run of the model when the last layer of interest has run."""


class _Measure:
    """The measurement of one model and its inputs."""

    def __init__(
        self,
        model: nn.Module,
        inputs: Inputs,
        places: dict[int, Places],
        sizes: Sequence[tuple[int, int]],
    ) -> None:
        self._model = model
        self._inputs = inputs
        self._leaves = list(places)
        self._shapes = [inputs.leaves[leaf].shape for leaf in places]
        self._sizes = sizes
        # All numbers of all inputs in one row.
        flat = [[axis.flatten() for axis in each] for each in places.values()]
        self._at = Places(*(torch.cat(axis) for axis in zip(*flat, strict=True)))
        self._probes = self._random_parts(torch.Generator().manual_seed(0))

    def grids(self) -> dict[str, tuple[Grid, ...]]:
        """Return the grids of each layer whose keys stand for parts of pictures."""
        with torch.no_grad():
            before = self._values({})
            changes = [self._values(self._changed(part)) for part in self._probes]
        changed = {
            name: torch.stack([_differs(value, values[name]) for values in changes])
            for name, value in before.items()
        }  # (probes, entries, num_kv_heads, kv_len)
        left = [name for name, each in changed.items() if bool(each.any())]
        grids: dict[str, tuple[Grid, ...]] = {}
        while left:
            # One layer is measured for all of its shape. Layers that differ from it follow.
            leaders = {changed[name].shape: name for name in reversed(left)}
            values, pixels = self._differentiable(max(leaders.values(), key=left.index))
            for leader in leaders.values():
                spots, hits, overlapping = self._spots(values[leader], pixels)
                agreeing = [name for name in left if _agree(changed[name], hits)]
                if leader in agreeing:
                    measured = lattices(spots, self._sizes, overlapping=overlapping)
                    grids |= {name: measured for name in agreeing if measured}
                else:  # nor do other layers that change as it does
                    pattern = changed[leader]
                    agreeing = [name for name in left if torch.equal(changed[name], pattern)]
                left = [name for name in left if name not in agreeing]
        return {name: grids[name] for name in before if name in grids}

    def _random_parts(self, random: torch.Generator) -> list[Tensor]:
        """Return the numbers in a random rectangle of each picture, as bool tensors.

        Each picture has another rectangle, so that layers that read one picture each differ.
        """
        parts: list[Tensor] = []
        picture = self._at.picture.clamp(min=0)
        for _ in range(_PROBES):
            inside = self._at.picture >= 0
            for axis in (self._at.x, self._at.y):
                starts = torch.rand(
                    len(self._sizes), generator=random, dtype=torch.float64, device="cpu"
                )
                start = 0.5 * starts[picture]
                inside = inside & (axis > start) & (axis < start + 0.4)
            parts.append(inside)
        return parts

    def _changed(self, part: Tensor) -> dict[int, Tensor]:
        """Return the inputs with other numbers in a part of the pictures."""
        changed: dict[int, Tensor] = {}
        parts = cast("Sequence[Tensor]", part.split([shape.numel() for shape in self._shapes]))
        for leaf, inside, shape in zip(self._leaves, parts, self._shapes, strict=True):
            pixels = cast(Tensor, self._inputs.leaves[leaf]).detach()
            inside = inside.view(shape).to(pixels.device)
            noise = torch.randn(shape, generator=torch.Generator().manual_seed(1), device="cpu").to(
                pixels
            )
            changed[leaf] = torch.where(inside, pixels + 1 + noise.abs(), pixels)
        return changed

    def _values(self, pixels: dict[int, Tensor], last: str | None = None) -> dict[str, Tensor]:
        """Run the model without the outputs of its attention, and return the values of each layer.

        Args:
            pixels: the leaves of the inputs that replace the model's.
            last: the layer after which the run ends; None for the last.

        Returns:
            (entries, num_kv_heads, kv_len, head_dim) for each name of a layer with keys.
        """
        count, outputs = [0], list[Any]()

        def note(done: int) -> None:
            count[0] = done

        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RefusedWarning)
            with (
                observe(self._model, keep="qkv", progress=note) as seen,
                _without_attention(self._model, count, outputs, seen, last),
                suppress(_StopError),
            ):
                self._inputs.call(self._model, pixels)
        values: dict[str, Tensor] = {}
        for layer in seen.layers:
            if layer.value is not None:
                value = layer.whole_value()
                heads = value if value.ndim > 2 else value[None]
                values[layer.name] = heads.reshape(-1, *heads.shape[-3:])
        return values

    def _differentiable(self, last: str) -> tuple[dict[str, Tensor], list[Tensor]]:
        """Return the values of each layer up to one, and the pixels that they are functions of."""
        pixels = [
            cast(Tensor, self._inputs.leaves[leaf]).detach().clone().requires_grad_()
            for leaf in self._leaves
        ]
        with torch.enable_grad():
            # A model may change its inputs in place, but not a leaf of the graph.
            inputs = {leaf: each.clone() for leaf, each in zip(self._leaves, pixels, strict=True)}
            return self._values(inputs, last), pixels

    def _spots(self, key: Tensor, pixels: list[Tensor]) -> tuple[list[Spot], Tensor, bool]:
        """Return the place of each token, the part of each that a probe changes, and overlap."""
        random = torch.Generator().manual_seed(2)
        direction = torch.randn(key.shape, generator=random, device="cpu").to(key)

        def depends(tokens: Tensor) -> Tensor:
            """Return the numbers that some of the tokens depend on; tokens (entries, kv_len)."""
            if not key.requires_grad:
                return torch.zeros(len(self._at.x), dtype=torch.bool, device="cpu")
            chosen = direction * tokens.to(key)[:, None, :, None]
            gradients = torch.autograd.grad(
                key, pixels, chosen, retain_graph=True, materialize_grads=True
            )
            return torch.cat(
                [(each.abs() > _ZERO * each.abs().max()).flatten().cpu() for each in gradients]
            )

        entries, length = key.shape[0], key.shape[-2]
        numbers = torch.arange(entries * length, device="cpu").view(entries, length)
        owner, is_shared = torch.zeros(len(self._at.x), dtype=torch.long, device="cpu"), False
        for bit in range(max(1, (entries * length - 1).bit_length())):
            has_bit = numbers >> bit & 1 == 1
            ones, zeros = depends(has_bit), depends(~has_bit)
            is_shared = is_shared or bool((ones & zeros).any())
            owner = torch.where(ones | zeros, owner + (ones.long() << bit), -1)
            if is_shared:
                break
        count = entries * length
        if not is_shared:
            sizes = cast("list[int]", torch.bincount(owner + 1, minlength=count + 1).tolist())
            fields = cast("Sequence[Tensor]", owner.argsort().split(sizes))[1:]
        elif count <= _MOST_FIELDS:
            fields = [depends(numbers == number).nonzero()[:, 0] for number in range(count)]
        else:
            return [], torch.zeros(_PROBES, entries, length, device="cpu"), True
        spots, hits = list[Spot](), torch.zeros(_PROBES, count, device="cpu")
        for number, field in enumerate(fields):
            if len(field):
                hits[:, number] = torch.stack([part[field].float().mean() for part in self._probes])
            spot = self._spot(field, *divmod(number, length), overlapping=is_shared)
            spots += [] if spot is None else [spot]
        return spots, hits.view(_PROBES, entries, length), is_shared

    def _spot(self, field: Tensor, entry: int, token: int, *, overlapping: bool) -> Spot | None:
        """Return the place of a token from the numbers it depends on; None if it has none.

        The place of a token whose field overlaps others is the middle of the field.
        """
        inside = field[self._at.picture[field] >= 0]
        if not len(inside):
            return None
        picture = int(self._at.picture[inside].amin())
        here, in_picture = self._at.picture[inside] == picture, self._at.picture == picture
        middles, widths, full = list[float](), list[float](), list[bool]()
        for axis, length in zip((self._at.x, self._at.y), self._sizes[picture], strict=True):
            at = axis[inside[here]] * length
            if overlapping:
                first, last = map(float, at.aminmax())
                least, most = (float(each) * length for each in axis[in_picture].aminmax())
                middles.append((first + last) / 2)
                widths.append(last - first)
                full.append(first > least + 0.5 and last < most - 0.5)
            else:
                middles.append(float(at.mean()))
                # The standard deviation of an even distribution is its width / sqrt(12).
                widths.append(float((12 * at.var(correction=0)).sqrt()))
                full.append(len(inside) == len(field))
        (x, y), (width, height) = middles, widths
        return Spot(token, entry, picture, x, y, width, height, *full)


def _differs(value: Tensor, changed: Tensor) -> Tensor:
    """Return True where a token's value differs by more than rounding, (..., kv_len)."""
    rounding = 8 * torch.finfo(value.dtype).eps * value.abs().amax(-1, keepdim=True)
    return ((value - changed).abs() > rounding).any(-1).cpu()


def _agree(changed: Tensor, hits: Tensor) -> bool:
    """Return True if the tokens of a layer changed that the probes should change, in each head.

    Args:
        changed: the tokens that changed, (probes, entries, num_kv_heads, kv_len).
        hits: the part of the numbers of each token that a probe changed, (probes, entries, kv_len).
    """
    if (*changed.shape[:2], changed.shape[3]) != hits.shape:
        return False
    hits = hits[:, :, None]
    return not bool((changed & (hits == 0)).any() | (~changed & (hits >= _CERTAIN)).any())


@contextmanager
def _without_attention(
    model: nn.Module, count: list[int], outputs: list[Any], seen: Recording, last: str | None
) -> Generator[None]:
    """Set the output of each attention of a model to zero, inside the block.

    Args:
        model: the model.
        count: the number of attentions so far, which ``observe`` counts.
        outputs: collects the outputs, if gradients are enabled. They keep the values alive, which
            ``observe`` connects to the graph when its block ends.
        seen: the recording of the run.
        last: the layer after which the run ends with ``_StopError``; None for the last.
    """
    done = 0

    def hook(_module: nn.Module, _inputs: Any, output: Any) -> Any:
        nonlocal done
        if count[0] == done:
            return output
        # The first module that ends after an attention returns its output, projected or not.
        done = count[0]
        if torch.is_grad_enabled():
            outputs.append(output)
        if last is not None and last in seen:
            raise _StopError
        return tree_map(_zeroed, output)

    hooks = [module.register_forward_hook(hook) for module in model.modules()]
    try:
        yield
    finally:
        for handle in hooks:
            handle.remove()


def _zeroed(value: Any) -> Any:
    is_numbers = isinstance(value, Tensor) and value.is_floating_point()
    return torch.zeros_like(value) if is_numbers else value
