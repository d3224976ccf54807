#!/usr/bin/env python3
"""Makes the operator references with PyTorch: outputs and gradients of single operators on small random inputs.

    python3 make_ops_reference.py    (PyTorch on the CPU; writes ops.ref beside itself)

All arithmetic is float64 on inputs that are exact in float32. Entries are named <operator>/<operand>, where
d<operand> is the gradient of sum(output · dy).
"""

import math
import pathlib

import numpy
import torch

import make_model_reference as model
import reference_file

ENTRIES = {}


def rand(*shape, scale=1.0, shift=0.0):
    """Normal numbers, exact in float32, as a float64 leaf."""
    return (shift + scale * torch.randn(shape)).double().requires_grad_()


def keep(prefix, **tensors):
    for name, values in tensors.items():
        if isinstance(values, torch.Tensor):
            values = values.detach().numpy()
        if values.dtype == numpy.float64:
            values = values.astype(numpy.float32)
        ENTRIES[f"{prefix}/{name}"] = values.reshape(-1, values.shape[-1])


def backward(prefix, y, **inputs):
    """Keeps the inputs, the output, a random dy and the gradients."""
    dy = rand(*y.shape)
    y.backward(dy)
    keep(prefix, **inputs, y=y, dy=dy, **{"d" + name: x.grad for name, x in inputs.items() if x.grad is not None})


def norms():
    for kind in ("rmsnorm", "layernorm"):
        residual, delta = rand(5, 37), rand(5, 37)
        weight, bias = rand(37, scale=0.3, shift=1.0), rand(37)
        x = (residual + delta).detach().float().double().requires_grad_()
        if kind == "rmsnorm":
            y = model.rms_norm(x, weight, 1e-5)
            bias.requires_grad_(False)
        else:
            y = torch.nn.functional.layer_norm(x, (37,), weight, bias, 1e-5)
        backward(kind, y, x=x, weight=weight, bias=bias)
        keep(kind, residual=residual, delta=delta)


def heads():
    """Rope, QK norm and attention on one packed projection: 4 query heads on 2 key heads of 8."""
    batch, sequence, heads, kv_heads, size = 2, 12, 4, 2, 8
    config = dict(head_size=size, rope_theta=10000.0, sequence=sequence)
    angles = model.rope_angles(config)
    keep("rope", cos_sin=torch.cat((angles.cos(), angles.sin()), dim=-1))
    angles = torch.cat((angles.cos(), angles.sin()), dim=-1).float().double()

    def split(qkv):
        parts = qkv.view(batch, sequence, heads + 2 * kv_heads, size).transpose(1, 2)
        return parts.split((heads, kv_heads, kv_heads), dim=1)

    def pack(*parts):
        return torch.cat(parts, dim=1).transpose(1, 2).reshape(batch * sequence, -1)

    def rotate(x):
        (a, b), (cos, sin) = x.chunk(2, dim=-1), angles.chunk(2, dim=-1)
        return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)

    def projection():
        return rand(batch * sequence, (heads + 2 * kv_heads) * size)

    x = projection()
    q, k, v = split(x)
    backward("rope", pack(rotate(q), rotate(k), v), x=x)

    x = projection()
    q, k, v = split(x)
    q_weight, k_weight = rand(size, scale=0.3, shift=1.0), rand(size, scale=0.3, shift=1.0)
    y = pack(model.rms_norm(q, q_weight, 1e-6), model.rms_norm(k, k_weight, 1e-6), v)
    backward("head_norm", y, x=x, q_weight=q_weight, k_weight=k_weight)

    x = projection()
    backward("attention", pack(model.attention(*split(x))), x=x)


def activations():
    x = rand(4, 2 * 19, scale=2.0)
    gate, up = x.chunk(2, dim=-1)
    backward("swiglu", torch.nn.functional.silu(gate) * up, x=x)
    x = rand(4, 33, scale=2.0)
    backward("gelu", torch.nn.functional.gelu(x, approximate="tanh"), x=x)


def embedding():
    ids = torch.tensor([3, 0, 7, 3, 3, 9, 1, 0])
    positions = torch.tensor([0, 1, 2, 3, 4, 0, 1, 2])
    table, position_table = rand(10, 21), rand(6, 21)
    y = table[ids] + position_table[positions]
    backward("embedding", y, table=table, position_table=position_table)
    keep("embedding", ids=ids.int(), positions=positions.int(), order=torch.argsort(ids, stable=True).int())


def cross_entropy():
    logits = rand(9, 53, scale=3.0)
    targets = torch.tensor([4, 52, -1, 0, 17, -1, 33, 33, 1])
    loss = torch.nn.functional.cross_entropy(logits, targets, ignore_index=-1, reduction="sum")
    loss.backward()
    keep("cross_entropy", logits=logits, targets=targets.int(), loss=loss.reshape(1), dlogits=logits.grad)


def adamw():
    """Three steps at rates 0.01, 0.02, 0.03; the gradient sums over 8 tokens and is clipped to norm 1."""
    x = rand(1, 40)
    keep("adamw", initial=x)
    optimizer = torch.optim.AdamW([x], lr=1.0, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)
    norms = []
    for step, spread in enumerate((16.0, 0.5, 4.0)):
        gradient = rand(1, 40, scale=spread).detach()
        keep("adamw", **{f"gradient{step}": gradient})
        norm = gradient.norm().item() / 8
        x.grad = gradient / 8 * min(1.0, 1.0 / norm)
        optimizer.param_groups[0]["lr"] = 0.01 * (step + 1)
        optimizer.step()
        norms.append(norm)
    keep("adamw", updated=x, norms=torch.tensor([norms]))


if __name__ == "__main__":
    torch.manual_seed(4321)
    for make in (norms, heads, activations, embedding, cross_entropy, adamw):
        make()
    path = pathlib.Path(__file__).parent / "ops.ref"
    reference_file.write(path, ENTRIES)
    print(f"{path.name}: {len(ENTRIES)} entries, {path.stat().st_size} bytes")
