"""Weights that move while a text is read: which they are, and how one segment moves them. The trained ones are never written to.

    trained w0          shared by everybody, read only
    fast w              a lane's own:   w  <-  w - rate * g / size,   then back by a share:   w  <-  w + decay * (w0 - w)

g is the gradient of a segment's mean loss. `size` is 1 under sgd; under rms the root of its mean square on training text (`statistics.py`), and a weight
with large gradients goes back the faster (Krause et al. 2018).
"""

import copy
import math
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import torch
from torch import Tensor, nn

from transformer_xl import native
from transformer_xl.config import AdaptationConfig
from transformer_xl.errors import ConfigError, InputError
from transformer_xl.model import AnyModel, Recurrent
from transformer_xl.model.adapters import UP, attach, factor_shapes, merged
from transformer_xl.model.products import Linear, LowRank, multiplies_bfloat16

SMALLEST = 0.1
"""Of the mean size of a tensor's gradients: what is added to each, so that a weight that hardly ever moved in training is not thrown far by one segment."""
SEED = 1
MOST_KEPT = 31 << 20
"""Bytes. The C library keeps no more than twice a little over that, whatever it is asked for."""


class FastWeights:
    """A model of its own whose moving weights can be exchanged: `use` puts a lane's in place, `learn` moves them."""

    def __init__(self, model: AnyModel, how: AdaptationConfig, *, sizes: Mapping[str, Tensor] | None = None) -> None:
        """`sizes`: of gradients on training text, for rms."""
        self.how = how
        self._adopt(_own_model(model, how))
        self.trained = [weight.data for weight in self._moving]
        self._inverse: list[Tensor] = []
        self._back: list[Tensor] = []
        if how.moves and how.rule == "rms":
            self._take(sizes)
        like = self.trained[0]
        self._compiled = native.usable(like) and all(
            weight.is_contiguous() and weight.dtype == like.dtype for weight in self.trained
        )
        self.rounding = torch.bfloat16 if multiplies_bfloat16() else None
        """Of the factors of products on the way back. What is told stays as it is, and a gradient of some dozen tokens is rough enough by itself."""
        if how.moves and like.is_cpu:
            _keep_pages(sum(weight.nbytes for weight in self.trained))

    def _adopt(self, model: AnyModel) -> None:
        self.model = model
        self._used: Sequence[Tensor] = ()
        """The lane's weights that the model has now."""
        self._kernel: native.MovingWeights | None = None
        """Of these."""
        moving = {name: weight for name, weight in model.named_parameters() if weight.requires_grad}
        self.names, self._moving = list(moving), list(moving.values())

    def twin(self) -> "FastWeights":
        """The same by a model of its own: each of two threads may use one."""
        other, moving = copy.copy(self), set(self.names)
        other._adopt(_with_own_parameters(self.model, moves=lambda name: name in moving))
        other.use(self.trained)
        return other

    def _take(self, sizes: Mapping[str, Tensor] | None) -> None:
        if sizes is None:
            raise InputError(
                "adaptation.rule: 'rms' divides by the size of gradients on training text, which this run does not have; make it with:"
                " txl tune-adaptation RUN, or take the rule 'sgd'"
            )
        own = []
        for name, weight in zip(self.names, self.trained, strict=True):
            if name not in sizes or sizes[name].shape != weight.shape:
                raise ConfigError(
                    f"adaptation: {name} has no size of gradients of its shape in this run; make them anew with: txl tune-adaptation RUN"
                )
            own.append(sizes[name].to(weight))
        mean = float(sum(size.sum() for size in own)) / sum(size.numel() for size in own)
        # A tensor without any gradient on the training text, such as that of a tail nobody met, stands still.
        self._inverse = [1 / (size + SMALLEST * size.mean()) if bool(size.any()) else size for size in own]
        self._back = [(self.how.decay * size / mean).clamp_(max=1.0) for size in own] if self.how.decay else []

    def fresh(self) -> list[Tensor]:
        """Of a lane that has learned nothing."""
        return [weight.clone() for weight in self.trained]

    def use(self, weights: Sequence[Tensor]) -> AnyModel:
        """The model with these weights, which are read and, by `learn`, written to."""
        if weights is not self._used:
            for parameter, weight in zip(self._moving, weights, strict=True):
                parameter.data = weight
            self._used, self._kernel = weights, None
        return self.model

    def snapshot(self, weights: Sequence[Tensor]) -> AnyModel:
        """A model with these weights as they are now, adapters merged: for readers, and for as long as they like."""
        own = _with_own_parameters(self.use(weights), moves=lambda name: False)
        moved = set(self.names)
        for name, weight in own.named_parameters():
            if name in moved:
                weight.data = weight.data.clone()
        if self.how.learns == "adapters":
            plain = merged(own.state_dict())
            for module in own.modules():
                if isinstance(module, Linear):
                    module.adapter = None
            own.load_state_dict(plain, assign=True)
        return own.eval()

    def gradients(self, loss: Tensor) -> list[Tensor | None]:
        """Of a loss that the model in use computed; None where it does not depend on a weight."""
        self._drop_gradients()
        loss.backward()  # type: ignore[no-untyped-call]
        return [parameter.grad for parameter in self._moving]

    def _drop_gradients(self) -> None:
        self.model.vocabulary.give_back_gradient()
        for parameter in self._moving:
            parameter.grad = None

    def learn(self, loss: Tensor) -> bool:
        """Moves the weights in use. False where a gradient is not finite: then they stay as they are."""
        moved = self._move(self.gradients(loss))
        self._drop_gradients()
        return moved

    def _move(self, gradients: Sequence[Tensor | None]) -> bool:
        if not self._compiled:
            return self._move_by_torch(gradients)
        if self._kernel is None:
            beside = {"inverse": self._inverse, "back": self._back}
            self._kernel = native.MovingWeights(self._used, self.trained, **beside)
        return self._kernel.move(gradients, rate=self.how.rate, decay=self.how.decay)

    @torch.no_grad()
    def _move_by_torch(self, found: Sequence[Tensor | None]) -> bool:
        """As the kernel does."""
        places = [place for place, gradient in enumerate(found) if gradient is not None]
        gradients = [gradient for gradient in found if gradient is not None]
        if not bool(torch.nn.utils.get_total_norm(gradients).isfinite()):
            return False
        weights = [parameter.data for parameter in self._moving]
        moved = [weights[place] for place in places]
        if self._inverse:
            torch._foreach_addcmul_(moved, gradients, [self._inverse[place] for place in places], value=-self.how.rate)
        else:
            torch._foreach_add_(moved, gradients, alpha=-self.how.rate)
        if self._back:
            torch._foreach_lerp_(weights, self.trained, self._back)
        elif self.how.decay:
            torch._foreach_lerp_(weights, self.trained, self.how.decay)
        return True


def _keep_pages(count: int) -> None:
    """Gradients are made anew for each segment. What they lay in goes back to the system, which then has to make each page anew, and that takes as long as
    a fifth of a lesson. But the C library keeps twice as much as the largest piece that was ever freed, and so one such piece is."""
    torch.empty(min(count, MOST_KEPT), dtype=torch.uint8)


def _own_model(model: AnyModel, how: AdaptationConfig) -> AnyModel:
    """The same numbers under parameters of its own, so that moving them moves nobody else's."""
    own = _with_own_parameters(model, moves=lambda name: _moves(name, how.learns))
    if how.learns == "adapters":
        _attach(own, rank=how.rank)
    elif how.learns != "all" and isinstance(model, Recurrent):
        raise ConfigError(
            f"adaptation.learns: {how.learns!r} is for Transformer-XL, and this is an {model.config.cell}; take 'all'"
        )
    return own


def _with_own_parameters(model: AnyModel, *, moves: Callable[[str], bool]) -> AnyModel:
    memo: dict[int, object] = {id(buffer): buffer for buffer in model.buffers()}
    for name, weight in model.named_parameters():
        memo[id(weight)] = nn.Parameter(weight.data, requires_grad=moves(name))
    return copy.deepcopy(model, memo)


def moving_numbers(model: AnyModel, how: AdaptationConfig) -> int:
    """How many numbers would move, reckoned before anything is made."""
    if how.learns != "adapters":
        return sum(weight.numel() for name, weight in model.named_parameters() if _moves(name, how.learns))
    shapes = factor_shapes(model, rank=how.rank)
    return sum(math.prod(shape) for name, shape in shapes.items() if name.endswith(UP))


def fixed_numbers(model: AnyModel, how: AdaptationConfig) -> int:
    """What is kept beside them: the factors of adapters that stand still; under rms the size of every gradient, and how far each weight goes back."""
    moving, shapes = moving_numbers(model, how), {}
    if how.learns == "adapters":
        shapes = factor_shapes(model, rank=how.rank)
    factors = sum(math.prod(shape) for name, shape in shapes.items() if not name.endswith(UP))
    return factors + (3 * moving if how.rule == "rms" else 0)


def _moves(name: str, learns: str) -> bool:
    # A row for a run of tokens is read too rarely to learn from one segment, and there are millions.
    if name.startswith("ngrams.tables_"):
        return False
    part = name.split(".")[2] if name.startswith("layers.") and name.count(".") > 1 else name.split(".")[0]
    attends = part.startswith(("query", "key_value", "attention_", "neighbours_", "encoding"))
    match learns:
        case "all":
            return True
        case "layers":
            return not name.startswith(("vocabulary.", "ngrams."))
        case "attention":
            return attends
        case "feed_forward":
            return name.startswith("layers.") and not attends
        case _:
            return False


def _attach(model: AnyModel, *, rank: int) -> None:
    """Adapters of which one factor moves, from zero. The other is drawn, once for all and everywhere alike: what is learned is linear in what moves, and
    a lane need keep no more."""
    with torch.random.fork_rng(devices=[]):
        attach(model, rank=rank)
    drawn = np.random.RandomState(SEED)  # whose numbers are promised never to change
    for module in model.modules():
        if isinstance(module, LowRank):
            numbers = drawn.standard_normal(tuple(module.down_RI.shape)) * rank**-0.5
            module.down_RI.data = torch.from_numpy(numbers).to(module.down_RI)
            module.down_RI.requires_grad_(False)
