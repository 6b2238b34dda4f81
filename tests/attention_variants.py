"""Attention written by hand, with one thing done to it that is easily missed.

Each variant takes query and key, (2, 3, 5, 4), and value, (2, 3, 5, 5), and returns its output,
(2, 3, 5, 5). The value is the identity, so the output is what met the value.
"""

import itertools
from collections.abc import Callable

import torch
from torch import Tensor

Variant = Callable[[Tensor, Tensor, Tensor], Tensor]
Change = Callable[[Tensor], object]

B, H, T = 2, 3, 5
MOMENTS = ("before the softmax", "before the value", "after the value")


def scored(query: Tensor, key: Tensor) -> Tensor:
    return query @ key.mT


def _after_the_softmax(change: Change) -> Variant:
    """Change the weights; a change in place returns None or a list."""

    def variant(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        weights = scored(query, key).softmax(-1)
        changed = change(weights)
        return (changed if isinstance(changed, Tensor) else weights) @ value

    return variant


def _before_the_softmax(change: Change) -> Variant:
    def variant(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        scores = scored(query, key)
        changed = change(scores)
        return (changed if isinstance(changed, Tensor) else scores).softmax(-1) @ value

    return variant


def _of_a_factor(change: Change, factor: int, moment: str) -> Variant:
    """Change query or key, which were multiplied already."""

    def variant(*factors: Tensor) -> Tensor:
        query, key, value = factors[0].clone(), factors[1].clone(), factors[2]
        steps = (lambda: scored(query, key), lambda s: s.softmax(-1), lambda w: w @ value)
        result = steps[0]()
        for step, now in zip((*steps[1:], lambda output: output), MOMENTS, strict=True):
            if now == moment:
                change((query, key)[factor])
            result = step(result)
        return result

    return variant


def _of_a_mask(change: Change, moment: str, bias: Callable[[Tensor, Tensor], Tensor]) -> Variant:
    def variant(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        mask = torch.ones(T, T, dtype=query.dtype).tril_().sub_(1).mul_(3)
        scores = bias(scored(query, key), mask)
        if moment == MOMENTS[0]:
            change(mask)
        weights = scores.softmax(-1)
        if moment == MOMENTS[1]:
            change(mask)
        output = weights @ value
        if moment == MOMENTS[2]:
            change(mask)
        return output

    return variant


def _nothing(_: object) -> None:
    """The change was made in place."""


def _permuted(order: tuple[int, ...]) -> Change:
    return lambda w: w.permute(order).reshape(w.shape)


def _permuted_copy(order: tuple[int, ...]) -> Change:
    return lambda w: w.permute(order).contiguous().view(w.shape)


def _one_hot(w: Tensor) -> Tensor:
    drawn = torch.multinomial(w.float().flatten(0, 2), 1)
    return torch.zeros_like(w).flatten(0, 2).scatter_(-1, drawn, 1.0).view_as(w)


def _set_data(w: Tensor) -> None:
    w.data = w.flip(-1)


def _item(w: Tensor, index: object, number: object) -> None:
    w[index] = number


def _assign_all(w: Tensor) -> None:
    w[:] = w.flip(-1)


def _numpy(w: Tensor) -> None:
    """Write through memory that NumPy shares; bfloat16 is read as its bits."""
    bits = {2: torch.int16, 4: torch.int32}[w.element_size()]
    array = w.detach().view(bits).numpy()
    array[...] = array[..., ::-1].copy()


def _numpy_row(w: Tensor) -> None:
    bits = {2: torch.int16, 4: torch.int32}[w.element_size()]
    array = w.detach().view(bits).numpy()
    array[0, 0, 1] = array[0, 0, 1, ::-1].copy()


def _numpy_key(w: Tensor) -> None:
    bits = {2: torch.int16, 4: torch.int32}[w.element_size()]
    w.detach().view(bits).numpy()[1, 2, 1, 0] = 0


def _storage(w: Tensor) -> None:
    w.untyped_storage().copy_(w.flip(-1).contiguous().untyped_storage())


def _typed_storage(w: Tensor) -> None:
    w.untyped_storage()[0] = 63
    w.untyped_storage()[1] = 63
    w.untyped_storage()[2] = 63


def _dlpack(w: Tensor) -> None:
    torch.utils.dlpack.from_dlpack(w.detach()).mul_(0.25)


def _dlpack_row(w: Tensor) -> None:
    torch.utils.dlpack.from_dlpack(w.detach())[0, 1, 2].fill_(0.1)


def _apply(w: Tensor) -> None:
    w.apply_(lambda number: 1 - number)


def _map(w: Tensor) -> None:
    w.map_(w.flip(-1), lambda _, other: other)


def _resized(w: Tensor) -> Tensor:
    return w.as_strided(w.shape, (75, 25, 1, 5))


def _out(function: Callable[..., Tensor], *args: object) -> Change:
    return lambda w: function(w, *args, out=w)


def _set_source(w: Tensor) -> None:
    w.set_(w.flip(-1).contiguous())


def _swap(w: Tensor) -> None:
    first = w[:, 0].clone()
    w[:, 0] = w[:, 1]
    w[:, 1] = first


ORDERS = [order for order in itertools.permutations(range(4)) if order != (0, 1, 2, 3)]

LAYOUTS: dict[str, Change] = {
    **{f"permute {order}": _permuted(order) for order in ORDERS},
    **{f"permute {order} contiguous": _permuted_copy(order) for order in ORDERS},
    "view of rows and heads": lambda w: w.view(B, T, H, T).transpose(1, 2),
    "view of heads and batch": lambda w: w.view(H, B, T, T).transpose(0, 1),
    "transposed": lambda w: w.mT,
    "transposed and back": lambda w: w.mT.contiguous().mT,
    "as_strided": _resized,
    "swapaxes": lambda w: w.swapaxes(2, 3),
    "movedim": lambda w: w.movedim(3, 2),
    "rot90": lambda w: w.rot90(1, (2, 3)),
    "flatten and back": lambda w: w.flatten().view(B, H, T, T),
    "reshape of the transposed": lambda w: w.mT.flatten(1).view_as(w),
    "unfold": lambda w: w.unfold(2, T, 1).squeeze(2).mT,
    "unflatten heads first": lambda w: w.flatten(0, 1).unflatten(0, (H, B)).transpose(0, 1),
    "channel shuffle": lambda w: torch.channel_shuffle(w, 3),
    "pixel unshuffle": lambda w: torch.pixel_unshuffle(w.view(1, 1, 30, 5), 5).view(B, H, T, T),
    "cartesian view": lambda w: w.reshape(B, -1, H).mT.reshape(w.shape),
}

REPEATS: dict[str, Change] = {
    "first head repeated": lambda w: w[:, :1].repeat(1, H, 1, 1),
    "first sample repeated": lambda w: w[:1].repeat(B, 1, 1, 1),
    "first row repeated": lambda w: w[:, :, :1].repeat(1, 1, T, 1),
    "first key repeated": lambda w: w[..., :1].repeat(1, 1, 1, T),
    "first head expanded": lambda w: w[:, :1].expand_as(w),
    "first sample expanded": lambda w: w[:1].expand_as(w),
    "first row expanded": lambda w: w[:, :, :1].expand_as(w),
    "first head expanded and copied": lambda w: w[:, :1].expand_as(w).contiguous(),
    "first head cat": lambda w: torch.cat([w[:, :1]] * H, 1),
    "first sample cat": lambda w: torch.cat([w[:1]] * B, 0),
    "last row cat": lambda w: torch.cat([w[:, :, -1:]] * T, 2),
    "first head stacked": lambda w: torch.stack([w[:, 0]] * H, 1),
    "heads exchanged by cat": lambda w: torch.cat([w[:, 1:], w[:, :1]], 1),
    "samples exchanged by cat": lambda w: torch.cat([w[1:], w[:1]], 0),
    "rows exchanged by cat": lambda w: torch.cat([w[:, :, 2:], w[:, :, :2]], 2),
    "keys exchanged by cat": lambda w: torch.cat([w[..., 2:], w[..., :2]], 3),
    "chunks backwards": lambda w: torch.cat(w.chunk(3, 1)[::-1], 1),
    "split backwards": lambda w: torch.cat(w.split(2, 3)[::-1], 3),
    "unbind backwards": lambda w: torch.stack(w.unbind(1)[::-1], 1),
    "repeat_interleave": lambda w: w[:, :1].repeat_interleave(H, 1),
    "tile": lambda w: w[:, :1].tile((1, H, 1, 1)),
    "broadcast_to": lambda w: torch.broadcast_to(w[:, 1:2], w.shape),
    "add of zeros, broadcast": lambda w: w[:, :1] + torch.zeros_like(w),
    "product with ones, broadcast": lambda w: w[:, :1] * torch.ones_like(w),
    "take": lambda w: w.take(torch.arange(w.numel()).flip(0)).view_as(w),
    "take_along_dim": lambda w: w.take_along_dim(w.argsort(-1), -1),
    "padded": lambda w: torch.nn.functional.pad(w[..., 1:], (0, 1)),
    "padded in a circle": lambda w: torch.nn.functional.pad(w[..., 1:], (0, 1, 0, 0), "circular"),
    "hstack": lambda w: torch.hstack((w[:, 1:], w[:, :1])),
    "vstack": lambda w: torch.vstack((w[1:], w[:1])),
    "block": lambda w: torch.cat((torch.cat((w[:1], w[:1])),)),
}


def _along(axis: int) -> dict[str, Change]:
    order = torch.randperm((B, H, T, T)[axis], generator=torch.manual_seed(axis)).flip(0)
    if torch.equal(order, torch.arange(len(order))):
        order = order.flip(0)
    return {
        f"flip {axis}": lambda w: w.flip(axis),
        f"roll {axis}": lambda w: w.roll(1, axis),
        f"sort {axis}": lambda w: w.sort(axis).values,
        f"cumsum {axis}": lambda w: w.cumsum(axis),
        f"index {axis}": lambda w: w[(slice(None),) * axis + (order,)],
        f"index_select {axis}": lambda w: w.index_select(axis, order),
        f"gather {axis}": lambda w: w.gather(axis, w.argsort(axis)),
        f"softmax again {axis}": lambda w: w.softmax(axis),
        f"less the mean {axis}": lambda w: w - w.mean(axis, keepdim=True) + 0.2,
        f"over the sum {axis}": lambda w: w / w.square().sum(axis, keepdim=True),
        f"mean {axis}": lambda w: w.mean(axis, keepdim=True).expand_as(w),
        f"index_copy_ {axis}": lambda w: w.index_copy_(axis, order, w.clone()),
        f"index_add_ {axis}": lambda w: w.index_add_(axis, order, w.clone()),
        f"index_fill_ {axis}": lambda w: w.index_fill_(axis, order[:1], 0.3),
        f"select and fill {axis}": lambda w: _nothing(w.select(axis, 0).fill_(0.2)),
        f"narrow and copy {axis}": lambda w: _nothing(
            w.narrow(axis, 0, 1).copy_(w.narrow(axis, 1, 1))
        ),
        f"slice_scatter {axis}": lambda w: w.slice_scatter(w.narrow(axis, 1, 1), axis, 0, 1),
        f"select_scatter {axis}": lambda w: w.select_scatter(w.select(axis, 1), axis, 0),
        f"cummax {axis}": lambda w: w.cummax(axis).values,
        f"renorm {axis}": lambda w: w.renorm(2, axis, 0.1),
    }


IN_PLACE: dict[str, Change] = {
    "mul_": lambda w: w.mul_(2),
    "mul_ of each": lambda w: w.mul_(torch.linspace(0.5, 2, T).to(w.dtype)),
    "add_": lambda w: w.add_(0.1),
    "sub_": lambda w: w.sub_(0.1),
    "div_": lambda w: w.div_(3),
    "pow_": lambda w: w.pow_(2),
    "sqrt_": lambda w: w.sqrt_(),
    "neg_": lambda w: w.neg_(),
    "exp_": lambda w: w.exp_(),
    "fill_": lambda w: w.fill_(1 / T),
    "zero_": lambda w: _nothing(w[0, 0, :, 0].zero_()),
    "copy_": lambda w: w.copy_(w.flip(-1)),
    "copy_ of others": lambda w: w.copy_(torch.linspace(0, 1, w.numel()).view_as(w)),
    "copy_ of heads": lambda w: w.copy_(w.roll(1, 1)),
    "slice assignment": _assign_all,
    "item assignment": lambda w: _item(w, (0, 0, 0, 0), 0.9),
    "row assignment": lambda w: _item(w, (slice(None), slice(None), 1), 0.2),
    "key assignment": lambda w: _item(w, (..., 0), 0.0),
    "mask assignment": lambda w: _item(w, w > 0.3, 0.0),
    "assignment by index": lambda w: _item(w, (torch.tensor([0, 1]), torch.tensor([1, 2])), 0.1),
    "head assigned from another": lambda w: _item(w, (slice(None), 0), w[:, 1].clone()),
    "swapped heads": _swap,
    "set_": _set_source,
    "data assigned": _set_data,
    "data mul_": lambda w: w.data.mul_(2),
    "data copy_": lambda w: w.data.copy_(w.flip(-1)),
    "data index": lambda w: _item(w.data, (0, 0, 0), 0.2),
    "detached mul_": lambda w: _nothing(w.detach().mul_(0.5)),
    "detached part": lambda w: _nothing(w.detach()[0, 0, 1].mul_(0.5)),
    "masked_fill_": lambda w: w.masked_fill_(w < 0.1, 0.0),
    "masked_scatter_": lambda w: w.masked_scatter_(w > 0.2, w.flip(-1).contiguous()),
    "index_put_": lambda w: w.index_put_((torch.tensor([0]),), torch.tensor(0.2).to(w.dtype)),
    "index_put_ adds": lambda w: w.index_put_(
        (torch.tensor([0]),), torch.tensor(0.2).to(w.dtype), accumulate=True
    ),
    "scatter_": lambda w: w.scatter_(-1, w.argmax(-1, keepdim=True), 0.1),
    "scatter_ of others": lambda w: w.scatter_(-1, w.argsort(-1), w.clone()),
    "scatter_add_": lambda w: w.scatter_add_(-1, w.argmax(-1, keepdim=True), w[..., :1].clone()),
    "scatter_reduce_": lambda w: w.scatter_reduce_(
        -1, w.argmin(-1, keepdim=True), w[..., :1].clone(), "prod"
    ),
    "lerp_": lambda w: w.lerp_(w.flip(-1), 0.5),
    "addcmul_": lambda w: w.addcmul_(w, w),
    "addcdiv_": lambda w: w.addcdiv_(w, w + 1),
    "clamp_": lambda w: w.clamp_(0.1, 0.3),
    "clamp_min_": lambda w: w.clamp_min_(0.15),
    "round_": lambda w: w.round_(),
    "floor_": lambda w: w.floor_(),
    "frac_": lambda w: w.add_(0.5).frac_(),
    "relu_ of less": lambda w: w.sub_(0.1).relu_(),
    "sigmoid_": lambda w: w.sigmoid_(),
    "tanh_": lambda w: w.tanh_(),
    "hardtanh_": lambda w: torch.nn.functional.hardtanh_(w, 0.0, 0.3),
    "threshold_": lambda w: torch.nn.functional.threshold_(w, 0.2, 0.0),
    "tril_": lambda w: w.tril_(),
    "triu_": lambda w: w.triu_(),
    "fill_diagonal_": lambda w: _nothing(w[0, 0].fill_diagonal_(0)),
    "transpose_": lambda w: w.transpose_(2, 3),
    "t_ of a part": lambda w: _nothing(w[0, 0].t_().mul_(2)),
    "swapaxes_": lambda w: w.swapaxes_(2, 3),
    "as_strided_": lambda w: w.as_strided_((B, H, T, T), (75, 25, 1, 5)),
    "foreach_mul_": lambda w: torch._foreach_mul_([w], 2.0),
    "foreach_add_": lambda w: torch._foreach_add_([w], 0.1),
    "foreach_copy_": lambda w: torch._foreach_copy_([w], [w.flip(-1)]),
    "foreach_zero_": lambda w: torch._foreach_zero_([w[:, :, :, 0]]),
    "foreach_sqrt_": lambda w: torch._foreach_sqrt_([w]),
    "foreach_mul_ of a part": lambda w: torch._foreach_mul_([w[0, 0, 0]], 2.0),
    "foreach_lerp_": lambda w: torch._foreach_lerp_([w], [w.flip(-1)], 0.5),
    "foreach_mul": lambda w: torch._foreach_mul([w], 2.0)[0],
    "foreach_clamp_max_": lambda w: torch._foreach_clamp_max_([w], 0.2),
    "out=": _out(torch.mul, 2),
    "add out=": _out(torch.add, 0.1),
    "pow out=": _out(torch.pow, 2),
    "cumsum out=": _out(torch.cumsum, -1),
    "sort out=": lambda w: _nothing(
        torch.sort(w.clone(), out=(w, torch.empty(0, dtype=torch.long)))
    ),
    "softmax out=": _out(torch.softmax, -1),
    "roll into": lambda w: torch.cat((w[..., 1:].clone(), w[..., :1].clone()), -1, out=w),
    "index_select out=": lambda w: torch.index_select(w.clone(), 1, torch.tensor([2, 1, 0]), out=w),
    "numpy": _numpy,
    "numpy, one row": _numpy_row,
    "numpy, one number": _numpy_key,
    "storage": _storage,
    "storage bytes": _typed_storage,
    "dlpack": _dlpack,
    "dlpack, one row": _dlpack_row,
    "apply_": _apply,
    "map_": _map,
    "bernoulli_": lambda w: w.bernoulli_(0.5),
    "uniform_": lambda w: w.uniform_(),
    "normal_": lambda w: w.normal_(),
    "exponential_": lambda w: w.exponential_(),
    "geometric_": lambda w: w.geometric_(0.5),
    "cauchy_": lambda w: w.cauchy_(),
    "log_normal_": lambda w: w.log_normal_(),
    "random_": lambda w: w.random_(0, 2),
    "uniform_ of a part": lambda w: _nothing(w[0].uniform_()),
}

NEW: dict[str, Change] = {
    "full_like": lambda w: torch.full_like(w, 1 / T),
    "ones_like": lambda w: torch.ones_like(w) / T,
    "zeros_like and add": lambda w: torch.zeros_like(w).add_(0.2),
    "rand_like": torch.rand_like,
    "new_full": lambda w: w.new_full(w.shape, 0.2),
    "empty_like and copy_": lambda w: torch.empty_like(w).copy_(w.flip(-1)),
    "empty_like and fill_": lambda w: torch.empty_like(w).fill_(0.2),
    "randn_like, softmax": lambda w: torch.randn_like(w).softmax(-1),
    "bernoulli": torch.bernoulli,
    "multinomial": _one_hot,
    "gumbel": lambda w: torch.nn.functional.gumbel_softmax(w, dim=-1),
    "one hot of the largest": lambda w: torch.nn.functional.one_hot(w.argmax(-1), T).to(w.dtype),
    "eye": lambda w: torch.eye(T, dtype=w.dtype).expand_as(w),
    "noise": lambda w: w + torch.rand_like(w),
    "noise, multiplied": lambda w: w * torch.rand_like(w),
    "noise, one a row": lambda w: w * torch.rand(B, H, T, 1, dtype=w.dtype),
    "straight through": lambda w: w + (w.round() - w).detach(),
    "alpha_dropout": lambda w: torch.nn.functional.alpha_dropout(w, 0.5, True),
    "normalised": lambda w: torch.nn.functional.normalize(w, dim=-1),
    "threshold": lambda w: torch.where(w < 0.2, torch.zeros_like(w), w),
    "top 2": lambda w: torch.zeros_like(w).scatter(-1, w.topk(2).indices, w.topk(2).values),
    "squared": lambda w: w @ w,
    "squared and made whole": lambda w: w.square() / w.square().sum(-1, keepdim=True),
    "quantised": lambda w: (w * 4).round() / 4,
    "int8": lambda w: ((w * 8).to(torch.int8)).to(w.dtype) / 8,
    "complex": lambda w: (
        torch.view_as_real(torch.complex(w.float(), w.float()))[..., 0].to(w.dtype) * 2
    ),
    "lerp": lambda w: torch.lerp(w, w.flip(-1), 0.5),
    "dist": lambda w: torch.cdist(w.float(), w.float()).to(w.dtype),
    "conv": lambda w: torch.nn.functional.avg_pool2d(w.float(), 3, 1, 1).to(w.dtype),
    "einsum of heads": lambda w: torch.einsum("bhqk,hg->bgqk", w, torch.ones(H, H).to(w.dtype) / H),
    "kron": lambda w: torch.kron(torch.eye(2, dtype=w.dtype), w[0, 0, :2, :2])[:1, :1] + w,
    "log and exp": lambda w: (w.log() * 2).exp(),
    "log_softmax": lambda w: w.log_softmax(-1).exp(),
    "nan_to_num after log": lambda w: w.log().nan_to_num().exp() * 0.5,
    "vmap": torch.vmap(lambda each: each.flip(-1)),
    "bits": lambda w: (w.view(torch.int16) & 0x7000).view(w.dtype).view_as(w),
}

SCORES: dict[str, Change] = {
    "data mul_": lambda s: _nothing(s.data.mul_(2)),
    "data assigned": _set_data,
    "data part": lambda s: _item(s.data, (0, 1, 2, 3), 9.0),
    "numpy": _numpy,
    "numpy, one row": _numpy_row,
    "numpy, one number": _numpy_key,
    "storage": _storage,
    "dlpack": _dlpack,
    "dlpack, one row": _dlpack_row,
    "apply_": lambda s: _nothing(s.apply_(lambda number: -number)),
    "map_": _map,
    "set_": _set_source,
    "foreach_mul_": lambda s: torch._foreach_mul_([s], 2.0),
    "foreach_sqrt": lambda s: torch._foreach_abs([s])[0],
    "foreach_copy_": lambda s: torch._foreach_copy_([s], [s.flip(-1)]),
    "flip": lambda s: s.flip(-1),
    "roll": lambda s: s.roll(1, 2),
    "heads rolled": lambda s: s.roll(1, 1),
    "sort": lambda s: s.sort(-1).values,
    "first head": lambda s: s[:, :1].repeat(1, H, 1, 1),
    "first row": lambda s: s[:, :, :1].expand_as(s),
    "mixed view": lambda s: s.view(B, T, H, T).transpose(1, 2),
    "reshape": lambda s: s.transpose(0, 1).reshape(s.shape),
    "transposed": lambda s: s.mT,
    "relu": lambda s: s.relu(),
    "square": lambda s: s.square(),
    "abs_": lambda s: s.abs_(),
    "scaled by itself": lambda s: s * s,
    "scaled by each": lambda s: s * torch.linspace(0.5, 2, T).to(s.dtype),
    "scaled by each cell": lambda s: s * torch.linspace(0.5, 2, T * T).view(T, T).to(s.dtype),
    "bias of each": lambda s: s + torch.linspace(0, 2, T * T).view(T, T).to(s.dtype),
    "noise": lambda s: s + torch.rand_like(s),
    "normal_": lambda s: s.normal_(),
    "dropout": lambda s: torch.nn.functional.dropout(s, 0.5),
    "layer_norm": lambda s: torch.nn.functional.layer_norm(s, (T,)),
    "round": lambda s: s.round(),
    "clamp": lambda s: s.clamp(-1, 1),
    "out=": _out(torch.mul, 2),
    "lerp_": lambda s: s.lerp_(s.flip(-1), 0.5),
    "cumsum": lambda s: s.cumsum(-1),
    "masked by numbers": lambda s: s.masked_fill(s < 0, -1.0),
    "copy_ of a head": lambda s: _item(s, (slice(None), 0), s[:, 1].clone()),
    "resize": lambda s: s.as_strided(s.shape, (75, 25, 1, 5)),
    "erfinv_": lambda s: s.tanh_().erfinv_(),
    "half": lambda s: s.half().to(s.dtype),
    "tanh of heads": lambda s: torch.cat((s[:, :1].tanh(), s[:, 1:]), 1),
    "cat of heads": lambda s: torch.cat((s[:, 1:], s[:, :1]), 1),
    "stack of heads": lambda s: torch.stack(s.unbind(1)[::-1], 1),
    "index_put_": lambda s: s.index_put_((torch.tensor([0]),), torch.tensor(2.0).to(s.dtype)),
}

OF_FACTORS: dict[str, Change] = {
    "mul_": lambda x: x.mul_(2),
    "add_ of a row": lambda x: x[:, :, 1].add_(1.0),
    "data mul_": lambda x: x.data.mul_(2),
    "data row": lambda x: x.data[0, 0, 1].fill_(0.5),
    "detach fill_": lambda x: x.detach().fill_(0.1),
    "copy_": lambda x: x.copy_(x.flip(2)),
    "set_": lambda x: x.data.set_(x.flip(2).contiguous()),
    "numpy": _numpy,
    "numpy, one row": _numpy_row,
    "foreach": lambda x: torch._foreach_mul_([x], 2.0),
    "storage": _storage,
    "uniform_": lambda x: x.uniform_(),
    "dlpack": _dlpack,
}

OF_MASKS: dict[str, Change] = {
    "fill_": lambda m: m.fill_(-2.0),
    "data fill_": lambda m: m.data.fill_(0.0),
    "data part": lambda m: m.data[3].copy_(m.data[0]),
    "data transposed": lambda m: m.data.copy_(m.data.mT.clone()),
    "zero_": lambda m: m.zero_(),
}
ADDING: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "added": lambda s, m: s + m,
    "added in place": lambda s, m: s.add_(m),
    "filled": lambda s, m: s.masked_fill(m < -1, -torch.inf),
    "multiplied": lambda s, m: s * m[:, :1].exp(),
}


def _heads_outer(split: Callable[[Tensor], Tensor], join: Callable[[Tensor], Tensor]) -> Variant:
    def variant(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        query, key, value = split(query), split(key), split(value)
        return join(torch.bmm(torch.bmm(query, key.mT).softmax(-1), value))

    return variant


def _einsum(scores: str, output: str) -> Variant:
    def variant(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        weights = torch.einsum(scores, query, key).softmax(-1)
        return torch.einsum(output, weights, value)

    return variant


def _half_of_the_keys(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    weights = scored(query, key).softmax(-1)
    return weights[..., :3] @ value[:, :, :3]


def _one_head_twice(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    weights = scored(query, key).softmax(-1)
    return torch.stack([weights[:, 0] @ value[:, h] for h in range(H)], 1)


def _heads_backwards(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    weights = scored(query, key).softmax(-1)
    return torch.stack([weights[:, H - 1 - h] @ value[:, h] for h in range(H)], 1)


def _one_head_left_out(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    weights = scored(query, key).softmax(-1)
    return torch.cat((weights[:, :2] @ value[:, :2], torch.zeros_like(value[:, :1])), 1)


def _two_weights(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    weights, others = scored(query, key).softmax(-1), scored(key, query).softmax(-1)
    return (weights + others) / 2 @ value


def _product_of_two(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return scored(query, key).softmax(-1) @ scored(key, query).softmax(-1) @ value


def _added_outside(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    weights = scored(query, key).softmax(-1).flatten(0, 1)
    return torch.baddbmm(
        torch.zeros(6, T, T).to(value), weights, value.flatten(0, 1), alpha=2
    ).view(value.shape)


def _written_out_with_a_gate(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    weights = scored(query, key).softmax(-1)
    return (weights[..., None] * value[:, :, None] * 0.5).sum(-2)


def _written_out_over_the_queries(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    weights = scored(query, key).softmax(-1)
    return (weights[..., None] * value[:, :, None]).sum(-3)


PRODUCTS: dict[str, Variant] = {
    "heads outer": _heads_outer(
        lambda x: torch.cat(x.unbind(1), 0), lambda y: torch.stack(y.chunk(H, 0), 1)
    ),
    "heads outer by transpose": _heads_outer(
        lambda x: x.transpose(0, 1).flatten(0, 1), lambda y: y.unflatten(0, (H, B)).transpose(0, 1)
    ),
    "heads outer by chunk": _heads_outer(
        lambda x: torch.cat(x.transpose(1, 2).flatten(2).chunk(H, 2), 0),
        lambda y: torch.cat(y.chunk(H, 0), 2).unflatten(-1, (H, T)).transpose(1, 2),
    ),
    "weights transposed": _einsum("bhid,bhjd->bhij", "bhji,bhjd->bhid"),
    "keys for queries": _einsum("bhid,bhjd->bhji", "bhji,bhjd->bhid"),
    "heads summed": _einsum("bhid,bgjd->bhij", "bhij,bhjd->bhid"),
    "half of the keys": _half_of_the_keys,
    "one head twice": _one_head_twice,
    "heads backwards": _heads_backwards,
    "one head left out": _one_head_left_out,
    "two weights": _two_weights,
    "product of two": _product_of_two,
    "doubled by baddbmm": _added_outside,
    "written out with a gate": _written_out_with_a_gate,
    "written out over the queries": _written_out_over_the_queries,
}


def variants() -> dict[str, Variant]:
    """Every variant by its name, of at least 300."""
    found: dict[str, Variant] = {}
    weights = LAYOUTS | REPEATS | IN_PLACE | NEW
    for axis in range(4):
        weights |= _along(axis)
    for name, change in weights.items():
        found[f"weights: {name}"] = _after_the_softmax(change)
    for name, change in SCORES.items():
        found[f"scores: {name}"] = _before_the_softmax(change)
    for name, change in OF_FACTORS.items():
        for factor, word in enumerate(("query", "key")):
            for moment in MOMENTS:
                found[f"{word} {moment}: {name}"] = _of_a_factor(change, factor, moment)
    for name, change in OF_MASKS.items():
        for how, bias in ADDING.items():
            for moment in MOMENTS:
                found[f"mask {how}, {moment}: {name}"] = _of_a_mask(change, moment, bias)
    found.update({f"product: {name}": variant for name, variant in PRODUCTS.items()})
    return found
