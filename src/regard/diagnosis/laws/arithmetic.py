"""Laws about numbers: gradients, large scores, dropout in training."""

import inspect
import re
from typing import Any, cast

import torch
from torch import Tensor, nn

from regard.diagnosis.inputs.lab import Lab, NotTried, Run, differs, normal
from regard.diagnosis.inputs.signature import signature_of
from regard.diagnosis.inputs.specimen import Contents
from regard.diagnosis.inputs.tape import Place, Step, Tape, addresses, first_place, tensors_in
from regard.diagnosis.laws.law import Breach, Law


class Gradient(Law):
    """Gradients equal finite differences, and every matrix gets one."""

    name = "gradient"
    formula = "f(x + h d) - f(x - h d) = 2 h grad f(x) . d"
    example = "weights = scores.softmax(-1).detach()"

    _STEP = 1e-5

    def breach(self, lab: Lab) -> Breach | None:
        """Compare gradients along one direction with finite differences."""
        s = lab.specimen
        contents = s.contents(min(s.batch, 2), s.tokens if s.is_fixed else min(s.tokens, 5))
        call = lab.fresh(grads=True)
        try:
            run = lab.run(contents, call=call, grads=True, keeps=True)
        except Exception as error:
            raise _without_gradients(lab, error) from error
        given = s.by_name(run.arguments).items()
        masks = {slot.name for slot in s.masks if slot.meaning != "added"}
        own = [(n, t) for n, value in given if n not in masks for t in tensors_in(value)]
        leaves = [t for _, t in own if t.requires_grad]
        named = dict(call.named_parameters()) if isinstance(call, nn.Module) else {}
        named = {n: p for n, p in named.items() if p.requires_grad and p.is_floating_point()}
        wanted = [*leaves, *named.values()]
        if not run.rows.isfinite().all():
            raise NotTried("Its output is not finite.")
        if not wanted:
            raise NotTried("Nothing in it takes gradients.", applies=False)
        if not run.rows.requires_grad:
            return self._without_graph(lab, run)
        weight = normal(4, *run.rows.shape)
        found = _gradients(lab, run, weight, wanted)
        # A number that is added to all scores of a row gets a gradient of rounding alone.
        least = 1e-12 * max((float(g.abs().max()) for g in found if g is not None), default=0.0)
        idle = [
            name
            for (name, p), grad in zip(named.items(), found[len(leaves) :], strict=True)
            if grad is None
            or (p.ndim > 1 and float(grad.abs().max()) <= least and not _is_added(run, p))
            # A bias of the keys moves no weight, either, but it moves the rounding.
            or (not grad.any() and _rows_with_another(lab, contents, name).equal(run.rows))
        ]
        others = ((name, _rows_with_another(lab, contents, name)) for name in idle)
        moving = next((n for n, rows in others if differs(rows, run.rows).any()), None)
        if moving is not None:
            says = f"{moving} moves the output, and gets no gradient."
            return Breach(says, _cut(run))
        if idle:
            return self._idle(lab, run, idle)
        for name, grad in zip(named, found[len(leaves) :], strict=True):
            part = None if grad is None else _idle_part(lab, contents, run, name, grad)
            if part is not None:
                return self._idle(lab, run, [f"{part} of {name}"])
        # The past may be cut off on purpose, as in a recurrence over segments.
        past = {id(t) for n, t in own if _OF_PAST.search(n.lower())}
        kept = [n for n, g in enumerate(found) if g is not None or id(wanted[n]) not in past]
        wanted, found = [wanted[n] for n in kept], tuple(found[n] for n in kept)
        return self._compared(lab, contents, run, wanted, found, weight)

    @staticmethod
    def _without_graph(lab: Lab, run: Run) -> Breach:
        """Return the breach of an output without gradients.

        Raises:
            NotTried: the code computes without PyTorch, or turns gradients off.
        """
        if any(slot.is_array for slot in lab.specimen.slots) or not run.steps:
            raise NotTried("It computes without PyTorch.", applies=False)
        # A view of a parameter takes gradients even where they are turned off.
        new = [s for s in run.steps if s.place is not None and s.writes.isdisjoint(s.reads)]
        if not any(t.requires_grad for step in new for t in step.alive):
            lab.notes.append("It turns gradients off, so that nothing in it can be trained.")
            raise NotTried("It turns gradients off.", applies=False)
        return Breach("The output has no gradient.", _cut(run))

    @staticmethod
    def _idle(lab: Lab, run: Run, idle: list[str]) -> Breach:
        """Return the breach of parameters without influence.

        Raises:
            NotTried: an argument that was left out may need them.
        """
        are_several = len(idle) > 1 or idle[0].startswith("Numbers")
        verb, who = ("have", "they get") if are_several else ("has", "it gets")
        says = f"{', '.join(idle[:3])} {verb} no influence on the output: {who} no gradient."
        if others := _left_out(lab):
            raise NotTried(
                f"{says[:-1]} without {' or '.join(others)}: pass an example call that has one."
            )
        return Breach(says, _cut(run))

    def _compared(
        self,
        lab: Lab,
        contents: Contents,
        run: Run,
        wanted: list[Tensor],
        found: tuple[Tensor | None, ...],
        weight: Tensor,
    ) -> Breach | None:
        ways = [normal(5 + number, *w.shape) for number, w in enumerate(wanted)]
        starts = [w.detach().clone() for w in wanted]

        def at(step: float) -> float:
            with torch.no_grad():
                for w, start, way in zip(wanted, starts, ways, strict=True):
                    w.copy_(start + step * way)
            values = lab.specimen.by_name(run.arguments)
            extra = {k: v.detach() if isinstance(v, Tensor) else v for k, v in values.items()}
            again = lab.run(contents, call=run.call, extra=extra)
            return float((again.rows.detach() * weight).sum())

        step = self._STEP
        up, down, middle = at(step), at(-step), at(0.0)
        size = max(1.0, abs(middle))
        if abs(up + down - 2 * middle) > 1e-5 * size:
            raise NotTried("It jumps: small changes of its input make large ones of its output.")
        if abs(middle - float((run.rows.detach() * weight).sum())) > 1e-6 * size:
            raise NotTried("Two equal calls differ.")
        exact = sum(float((g * w).sum()) for g, w in zip(found, ways, strict=True) if g is not None)
        numeric = (up - down) / (2 * step)
        if abs(numeric - exact) > 1e-3 * max(1.0, abs(numeric)):
            step /= 100  # a ReLU may bend between the two points
            numeric = (at(step) - at(-step)) / (2 * step)
        if abs(numeric - exact) <= 1e-3 * max(1.0, abs(numeric)):
            return None
        return Breach(
            f"Along one direction finite differences give {numeric:.4f}, and backward() gives "
            f"{exact:.4f}.",
            _cut(run),
        )


def _readers(run: Run, parameter: Tensor) -> list[Step]:
    """Return the operations that read a parameter or a view of it, but for those of views."""
    at = addresses(parameter)[0]
    return [s for s in run.steps if at in s.reads and (at not in s.writes or s.name == "slice")]


def _is_added(run: Run, parameter: Tensor) -> bool:
    """Return True if a parameter is a bias of any shape."""
    readers = _readers(run, parameter)
    return bool(readers) and all(step.name in _ADDS for step in readers)


_OF_PAST = re.compile("mem|past|cache|state|prev|hist")
_ADDS = {"add", "add_", "sub", "sub_", "clone"}
_READERS = {"mm", "addmm", "bmm", "baddbmm", "mul", "add", "clone"}
_LOOKUPS = {"embedding", "index"}
_FILTERS = {"convolution"}


def _idle_part(lab: Lab, contents: Contents, run: Run, name: str, grad: Tensor) -> str | None:
    """Return a part of a parameter that has no influence, in words.

    The axis that a table is looked up in may wait for other positions.
    """
    assert isinstance(run.call, nn.Module)
    parameter = run.call.get_parameter(name)
    readers = _readers(run, parameter)
    names = {step.name for step in readers}
    if parameter.ndim < 2 or not names <= _READERS | _LOOKUPS | _FILTERS:
        return None
    looked_up = {axis for step in readers for axis in _looked_up(step)}
    is_table = bool(looked_up)
    if is_table and (half := _idle_half(lab, name, grad)) is not None:
        return half
    # A filter may be longer than the text; each of its output channels has to count.
    axes = 1 if names & _FILTERS else parameter.ndim
    for axis in (axis for axis in range(axes) if axis not in looked_up):
        idle = [not part.any() for part in grad.unbind(axis)]
        size = len(idle)
        least = 1 if is_table else 2
        first = next((i for i in range(size - least + 1) if all(idle[i : i + least])), None)
        if first is None:
            continue
        last = next((i for i in range(first, size) if not idle[i]), size) - 1
        part = (*[slice(None)] * axis, slice(first, last + 1))
        if not _is_idle(lab, contents, name, part):
            continue
        words = f"Numbers {first} to {last}" if last > first else f"Number {first}"
        return f"{words} of {size} along axis {axis}"
    return None


def _is_idle(lab: Lab, contents: Contents, name: str, part: Any) -> bool:
    """Return True if a part of a parameter has no influence.

    Of a few tokens a maximum or a ReLU may leave it out, so that more are tried.
    """
    s = lab.specimen
    more = (s.contents(s.batch, s.tokens, seed) for seed in range(1, 4))
    return all(
        _rows_with_another(lab, each, name, part, 100.0).equal(lab.run(each).rows)
        for each in (contents, *more)
    )


def _looked_up(step: Step) -> list[int]:
    """Return the axes of a table that an operation takes some places of."""
    if step.name != "index":
        return [0] if step.name in _LOOKUPS else []
    return [axis for axis, places in enumerate(step.args[1]) if places is not None]


def _idle_half(lab: Lab, name: str, grad: Tensor) -> str | None:
    """Return the rows of a table of distances that no number of tokens reads, in words.

    It has a row for each distance to one side and to the other, and every token sees every token.
    """
    s, size = lab.specimen, len(grad)
    reach = size // 2
    used = grad.flatten(1).any(1)
    before, after = used[:reach], used[size - reach :]
    is_half = size % 2 and reach > 1 and bool(before.any()) != bool(after.any())
    if not is_half or s.is_fixed or size > (s.most_tokens or _LONGEST) or not lab.influence.all():
        return None
    first = 0 if bool(after.any()) else size - reach
    part = slice(first, first + reach)
    longer = s.contents(1, size)
    if not _rows_with_another(lab, longer, name, part, 100.0).equal(lab.run(longer).rows):
        return None
    return f"Numbers {first} to {first + reach - 1} of {size} along axis 0"


_LONGEST = 65  # rows of a table that is tried with as many tokens


def _gradients(
    lab: Lab, run: Run, weight: Tensor, wanted: list[Tensor]
) -> tuple[Tensor | None, ...]:
    """Return the gradients of a weighted sum of the output; None where there is none."""
    try:
        with Tape():  # numbers of the code itself, such as weights in its file, are no float64
            total = (run.rows * weight).sum()
            gradients = torch.autograd.grad(total, wanted, allow_unused=True)
    except RuntimeError as error:
        raise _without_gradients(lab, error) from error
    return cast("tuple[Tensor | None, ...]", gradients)


def _without_gradients(lab: Lab, error: Exception) -> NotTried:
    """Return why no gradient was tried."""
    known = {
        "FlexAttention does not support backward": "flex_attention has none on a CPU",
        "inplace": "it writes in place into what they need",
    }
    why = next((own for said, own in known.items() if said in str(error)), None)
    if why is not None:
        lab.notes.append(f"Its gradients were not judged: {why}.")
    says = f"It does not run with gradients ({type(error).__name__})."
    return NotTried(says, applies=why is None)


def _rows_with_another(
    lab: Lab, contents: Contents, name: str, part: Any = ..., size: float = 1.0
) -> Tensor:
    """Return the output with another value of a part of a parameter."""
    call = lab.fresh()
    assert isinstance(call, nn.Module)
    with torch.no_grad():
        own = call.get_parameter(name)[part]
        own.add_(size * normal(6, *own.shape))
    return lab.run(contents, call=call).rows


def _left_out(lab: Lab) -> list[str]:
    """Return the arguments of a call that were left out, but for flags, masks and caches."""
    passed = {slot.name for slot in lab.specimen.slots}
    passed |= {form.argument for form, *_ in lab.specimen.forms}  # check makes these masks
    kinds = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return [
        p.name
        for p in signature_of(lab.specimen.call).parameters.values()
        if p.name not in passed
        and p.kind not in kinds
        and not (isinstance(p.default, bool) or _IS_BESIDE.search(p.name))
    ]


_IS_BESIDE = re.compile("mask|cache|past|causal")


def _cut(run: Run) -> Place | None:
    """Return the line of the first operation that drops a gradient; None if none is seen."""
    followed: set[int] = set()
    for step in run.steps:
        inputs = [t for t in tensors_in(step.args) if t.is_floating_point()]
        floats = [t for t in step.alive if t.is_floating_point()]
        is_cut = floats and not any(t.requires_grad for t in floats)
        if is_cut and any(t.requires_grad for t in inputs):
            return step.place
        if any(not t.requires_grad and addresses(t)[0] in followed for t in inputs):
            return step.place  # detached
        followed |= {addresses(t)[0] for t in floats if t.requires_grad}
    return None


class Large(Law):
    """Inputs 10 and 40 times as large give finite numbers in float32."""

    name = "large"
    formula = "f(40 x) is finite"
    example = "weights = scores.exp() / scores.exp().sum(-1, keepdim=True)  # overflows at 89"

    def breach(self, lab: Lab) -> Breach | None:
        """Run in float32 on inputs 10 and 40 times as large."""
        s = lab.specimen
        if s.has_own_size or not any(not slot.high for slot in s.sources.values()):
            raise NotTried("It takes no numbers that could be larger.", applies=False)
        for size in (10.0, 40.0):
            contents = s.contents(s.batch, s.tokens, seed=7, size=size)
            run = lab.run(contents, is_double=False, keeps=True)
            if run.rows.isfinite().all():
                continue

            def overflows(step: Step) -> bool:
                out = [t for t in step.outputs if t.is_floating_point()]
                return any(bool((t.isnan() | (t == torch.inf)).any()) for t in out)

            wrong = int((~run.rows.isfinite()).sum())
            return Breach(
                f"Inputs {size:g} times as large give {wrong} of {run.rows.numel()} numbers that "
                "are NaN or infinite; a softmax of any finite scores is finite.",
                first_place(run.steps, overflows),
                # Features of queries and keys apart may overflow; a softmax need not.
                is_definite=any(step.name in _SOFTMAX_KERNELS for step in run.steps),
            )
        return None


DROPS = ("native_dropout", "bernoulli_", "bernoulli", "rand_like", "rand", "dropout")
_BENDS = ("native_layer_norm", "gelu", "relu", "silu", "tanh", "sigmoid", "native_group_norm")
_PRODUCTS = ("mm", "bmm", "addmm", "baddbmm", "convolution")
_SOFTMAXES = ("_softmax", "_log_softmax", "exp")
_SOFTMAX_KERNELS = ("_softmax", "_scaled_dot_product_flash_attention_for_cpu")


class Training(Law):
    """In training mode the mean over dropout is the output of eval mode."""

    name = "training"
    formula = "mean of f_train(x) = f_eval(x)"
    example = "scores = dropout(scores)  # before the softmax"

    _SAMPLES = 1500

    def breach(self, lab: Lab) -> Breach | None:
        """Average many runs in training mode, side by side in one batch."""
        s = lab.specimen
        if not isinstance(s.call, nn.Module):
            raise NotTried("A function has no training mode.", applies=False)
        tokens = s.tokens if s.is_fixed else min(s.tokens, 5)
        contents = s.contents(1, tokens, size=2.0)
        still = lab.run(contents).rows[0]
        call = lab.fresh()
        assert isinstance(call, nn.Module)
        call.train()
        one = lab.run(contents, call=call, keeps=True)
        drops = [i for i, step in enumerate(one.steps) if step.name in DROPS]
        if not drops:
            return self._same(lab, contents, still, one.rows[0])
        if not lab.has_batch:
            raise NotTried("It takes no batch, in which many runs could stand side by side.")
        if s.has_given_samples:
            raise NotTried("Its example has other arguments for each sample.", applies=False)
        wide = {name: t.expand(self._SAMPLES, *t.shape[1:]) for name, t in contents.items()}
        bend = _first_bend(one, drops)
        if bend is None:
            many, where = lab.run(wide, call=call).rows, "of the output"
        else:
            runs = [lab.run(wide, call=call, keeps=True), lab.run(contents, keeps=True)]
            step, gives = bend
            many, still = _beside(step, one, runs, gives=gives)
            where = f"that {step.name} gives" if gives else f"that goes into {step.name}"
        if bool((many.isnan().any(0) & still.isfinite()).any()):
            says = f"In training mode numbers {where} are NaN, which are finite in eval mode."
            return Breach(says, one.steps[drops[0]].place)
        error = (many.mean(0) - still).abs() - 6 * many.std(0) / self._SAMPLES**0.5
        error = error.nan_to_num(0.0)  # scores of masked keys
        most = float(error.max())
        if not most > 1e-3:
            return None
        at = int(error.flatten().argmax())
        return Breach(
            f"Over {self._SAMPLES} runs in training mode a number {where} is "
            f"{float(many.mean(0).flatten()[at]):.3f} in the mean, and "
            f"{float(still.flatten()[at]):.3f} in eval mode.",
            one.steps[drops[0]].place,
        )

    @staticmethod
    def _same(lab: Lab, contents: Contents, still: Tensor, rows: Tensor) -> Breach | None:
        """Compare training and eval mode of code without dropout."""
        call = lab.fresh()
        assert isinstance(call, nn.Module)
        again = lab.run(contents, call=call.train(), seed=1).rows[0]
        is_normed = any(hasattr(part, "running_mean") for part in call.modules())
        if is_normed or still.shape != rows.shape or differs(again, rows).any():
            raise NotTried("It has no dropout, and training mode has another use.", applies=False)
        if not differs(rows, still).any():
            raise NotTried("It has no dropout.", applies=False)
        most = float((rows - still).abs().max())
        return Breach(f"In training mode, without dropout, the output differs by {most:.3g}.")


def _first_bend(run: Run, drops: list[int]) -> tuple[Step, bool] | None:
    """Return the first operation that bends numbers that were dropped; None if all are linear.

    True beside it: it is the softmax of scores that were dropped themselves, whose weights should
    have the mean, too.
    """
    dropped: set[int] = set()
    multiplied: set[int] = set()
    for number, step in enumerate(run.steps):
        inputs, out = set(step.reads), step.writes
        if number in drops:
            dropped |= out
        elif dropped & inputs:
            factors = [at for at in step.reads if at in dropped]
            is_square = step.name in (*_PRODUCTS, "mul") and len(factors) > 1
            is_bent = step.name in (*_BENDS, *_SOFTMAXES)
            if is_square or is_bent or step.name.startswith("_scaled_dot_product"):
                return step, step.name in _SOFTMAXES and not multiplied & inputs
            dropped |= out
            if step.name in _PRODUCTS or multiplied & inputs:
                multiplied |= out
    return None


def _beside(bend: Step, one: Run, runs: list[Run], *, gives: bool) -> tuple[Tensor, Tensor]:
    """Return the numbers of an operation in many runs at once, and in eval mode.

    Args:
        bend: the operation.
        one: the run that it is of.
        runs: of many samples in training mode, and of one sample in eval mode.
        gives: the numbers that it gives, and not those that it takes.

    Raises:
        NotTried: its numbers have another axis for the samples than the first.
    """
    nth = [step.name for step in one.steps[: one.steps.index(bend)]].count(bend.name)
    many, still = (_numbers_of(run.steps, bend.name, nth, gives=gives) for run in runs)
    if many is not None and still is not None:
        count = many.shape[0] // still.shape[0]
        if many.shape == (count * still.shape[0], *still.shape[1:]) and count > 1:
            return many.reshape(count, *still.shape), still
    raise NotTried("What is dropped passes through a nonlinear function afterwards.", applies=False)


def _numbers_of(steps: list[Step], name: str, nth: int, *, gives: bool) -> Tensor | None:
    """Return what the nth operation of a name takes or gives then; None if there is none."""
    places = [at for at, step in enumerate(steps) if step.name == name]
    if nth >= len(places):
        return None
    at = places[nth]
    if gives:
        return steps[at].outputs[0]
    tensor = next((t for t in steps[at].inputs if t.ndim > 1), None)
    for step in reversed(steps[:at]):
        for alive, copy in zip(step.alive, step.outputs, strict=True):
            if alive is tensor:
                return copy
    return None if tensor is None else tensor.detach()
