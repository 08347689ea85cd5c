"""Float32 master weights under AdamW, and the bfloat16 image that is trained and published (law 8).

The model computes with the image, upcast to its own dtype; the gradient is applied to the master; then the image is
made anew. So what an engine loads is what the learner's forward pass used, and updates too small to show in bfloat16
still add up in the master.
"""

from collections.abc import Mapping
from typing import Any, final

import torch
from torch import Tensor, nn


@final
class MasterWeights:
    """Holds the masters of a model's parameters; the model's own parameters become the image."""

    def __init__(self, model: nn.Module, *, betas: tuple[float, float]) -> None:
        self._images = dict(model.named_parameters())
        self.masters = {name: image.detach().clone().requires_grad_() for name, image in self._images.items()}
        self._betas = betas
        self.reset_optimizer()
        self._refresh()

    def reset_optimizer(self) -> None:
        """Forget all moments, as at the start of a stage."""
        matrices = [master for master in self.masters.values() if master.ndim > 1]
        vectors = [master for master in self.masters.values() if master.ndim <= 1]
        groups = [{"params": group} for group in (matrices, vectors) if group]
        self._optimizer = torch.optim.AdamW(groups, lr=0.0, betas=self._betas, weight_decay=0.0, fused=True)
        for master in self.masters.values():
            # As AdamW would make it in its first step; here already, so that it can be saved and loaded before.
            self._optimizer.state[master] = {
                "step": torch.zeros((), dtype=torch.float32),
                "exp_avg": torch.zeros_like(master),
                "exp_avg_sq": torch.zeros_like(master),
            }

    def gradient_norm(self) -> float:
        """Global L2 norm of the model's accumulated gradients; NaN or infinity where one of them is not finite."""
        grads = [image.grad for image in self._images.values() if image.grad is not None]
        return float(nn.utils.get_total_norm(grads)) if grads else 0.0

    def clear_gradients(self) -> None:
        for image in self._images.values():
            image.grad = None

    @torch.no_grad()
    def step(self, *, learning_rate: float, weight_decay: float, max_grad_norm: float) -> dict[str, float]:
        """One AdamW step with the model's gradients, clipped by their global norm; then they are cleared.

        Returns `grad_norm` (before clipping) and `changed_share`, the share of published weights that moved.
        Raises `ValueError`, with nothing changed, where a gradient is not finite.
        """
        norm = self.gradient_norm()
        if not norm < float("inf"):
            raise ValueError(f"the gradient's norm is {norm}")
        for name, image in self._images.items():
            # A parameter that got no gradient (an expert without tokens) has the gradient zero, and keeps its moments.
            grad = torch.zeros_like(image) if image.grad is None else image.grad
            self.masters[name].grad = grad.mul_(max_grad_norm / norm) if norm > max_grad_norm else grad
        for group in self._optimizer.param_groups:
            group["lr"] = learning_rate
            group["weight_decay"] = weight_decay if group["params"][0].ndim > 1 else 0.0
        self._optimizer.step()
        for master in self.masters.values():
            master.grad = None
        self.clear_gradients()
        return {"grad_norm": norm, "changed_share": self._refresh()}

    @torch.no_grad()
    def _refresh(self) -> float:
        """Make the image anew; returns the share of its values that changed."""
        num_changed = num = 0
        for name, image in self._images.items():
            fresh = self.masters[name].to(torch.bfloat16).to(image.dtype)
            num_changed += int((fresh != image).sum())
            num += image.numel()
            image.copy_(fresh)
        return num_changed / max(num, 1)

    def state(self) -> dict[str, Tensor]:
        """All tensors that a resume needs, by name: masters, moments, step counts. Loading fills them in place."""
        tensors: dict[str, Tensor] = {}
        for name, master in self.masters.items():
            tensors[f"master.{name}"] = master.detach()
            moments: Mapping[str, Any] = self._optimizer.state[master]
            for key in ("step", "exp_avg", "exp_avg_sq"):
                tensors[f"{key}.{name}"] = moments[key]
        return tensors

    def loaded(self) -> None:
        """Call after the tensors of `state` were filled: makes the image anew."""
        self.clear_gradients()
        self._refresh()
