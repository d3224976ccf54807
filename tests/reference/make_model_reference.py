#!/usr/bin/env python3
"""Makes the whole-model references with PyTorch: three AdamW steps of two tiny Llamas and a tiny GPT-2.

    python3 make_model_reference.py    (PyTorch on the CPU; writes model_*.ref beside itself)

All arithmetic is float64, so that the files hold the true values to float32 precision. Entries of a file:
  config/<name>      [1, 1] float64   sizes and constants of the model and of the optimizer
  tokens             [batch, sequence + 1] int32; inputs are the first `sequence` of a row, targets the last
  initial/<parameter>, gradient/<parameter>, updated/<parameter>   float32: before step 1, of the mean loss of
                     step 1 before clipping, after step 3 (all steps on the same batch)
  loss, gradient_norm   [1, 3] float64: of each step; the norm is before clipping

In GPT-2, keys get no rotation, so that softmax is invariant to `attention.k.bias`: its true gradient is 0, and what
AdamW makes of the rounding noise instead is no property of the model. `updated/` of it means nothing.
"""

import math
import pathlib

import torch

import reference_file

HERE = pathlib.Path(__file__).parent
OPTIMIZER = dict(lr=1e-2, beta1=0.9, beta2=0.95, epsilon=1e-8, weight_decay=0.1, clip=1.0)
COMMON = dict(layers=2, hidden=32, heads=4, head_size=8, mlp=48, vocabulary=61, sequence=16, batch=3)

MODELS = {
    "llama": dict(COMMON, kv_heads=2, qkv_bias=0, qk_norm=0, tied=0, norm_epsilon=1e-5, rope_theta=10000.0),
    "llama_variant": dict(COMMON, kv_heads=2, qkv_bias=1, qk_norm=1, tied=1, norm_epsilon=1e-6,
                          rope_theta=10000.0, rope_factor=8.0, rope_low_frequency=1.0, rope_high_frequency=4.0,
                          rope_original_positions=1024),
    "gpt2": dict(COMMON, kv_heads=4, tied=1, positions=20, norm_epsilon=1e-5),
}


def parameter_shapes(name, c):
    hidden, mlp, size = c["hidden"], c["mlp"], c["head_size"]
    gpt2 = name == "gpt2"
    shapes = {"embedding.weight": (c["vocabulary"], hidden)}
    if gpt2:
        shapes["positions.weight"] = (c["positions"], hidden)

    def norm(prefix):
        shapes[prefix + ".weight"] = (hidden,)
        if gpt2:
            shapes[prefix + ".bias"] = (hidden,)

    def linear(prefix, outputs, inputs, bias):
        shapes[prefix + ".weight"] = (outputs, inputs)
        if bias:
            shapes[prefix + ".bias"] = (outputs,)

    for n in range(c["layers"]):
        layer = f"layers.{n}."
        norm(layer + "attention_norm")
        for part, heads in (("q", c["heads"]), ("k", c["kv_heads"]), ("v", c["kv_heads"])):
            linear(layer + "attention." + part, heads * size, hidden, gpt2 or c["qkv_bias"])
        linear(layer + "attention.o", hidden, c["heads"] * size, gpt2)
        if not gpt2 and c["qk_norm"]:
            shapes[layer + "attention.q_norm.weight"] = (size,)
            shapes[layer + "attention.k_norm.weight"] = (size,)
        norm(layer + "mlp_norm")
        for part in ("up",) if gpt2 else ("gate", "up"):
            linear(layer + "mlp." + part, mlp, hidden, gpt2)
        linear(layer + "mlp.down", hidden, mlp, gpt2)
    norm("norm")
    if not c["tied"]:
        shapes["head.weight"] = (c["vocabulary"], hidden)
    return shapes


def initial_parameters(shapes):
    parameters = {}
    for name, shape in shapes.items():
        values = torch.randn(shape)
        if name.endswith("norm.weight"):
            values = 1.0 + 0.1 * values
        elif len(shape) == 1:
            values = 0.1 * values
        else:
            values = 0.2 * values
        parameters[name] = values.double().requires_grad_()
    return parameters


def rope_angles(c):
    """Angles [sequence, head_size / 2], with the frequency scaling of Llama 3.1 where the model has it."""
    half = c["head_size"] // 2
    frequencies = []
    for i in range(half):
        frequency = c["rope_theta"] ** (-i / half)
        if "rope_factor" in c:
            turns = c["rope_original_positions"] * frequency / (2 * math.pi)
            low, high = c["rope_low_frequency"], c["rope_high_frequency"]
            kept = min(1.0, max(0.0, (turns - low) / (high - low)))
            frequency = kept * frequency + (1 - kept) * frequency / c["rope_factor"]
        frequencies.append(frequency)
    return torch.outer(torch.arange(c["sequence"]).double(), torch.tensor(frequencies).double())


def rotate(x, angles):
    """x: [batch, heads, sequence, head_size], halves of a head as the two coordinates."""
    a, b = x.chunk(2, dim=-1)
    cos, sin = angles.cos(), angles.sin()
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)


def rms_norm(x, weight, epsilon):
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + epsilon) * weight


def attention(q, k, v):
    """Causal; q: [batch, heads, sequence, size], k and v with heads / group heads."""
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
    scores = q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])
    hidden = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
    return torch.softmax(scores.masked_fill(hidden, -math.inf), dim=-1) @ v


def forward(name, c, p, ids):
    """Logits [batch, sequence, vocabulary]."""
    gpt2 = name == "gpt2"

    def linear(x, prefix):
        return torch.nn.functional.linear(x, p[prefix + ".weight"], p.get(prefix + ".bias"))

    def norm(x, prefix):
        if gpt2:
            return torch.nn.functional.layer_norm(x, x.shape[-1:], p[prefix + ".weight"], p[prefix + ".bias"],
                                                  c["norm_epsilon"])
        return rms_norm(x, p[prefix + ".weight"], c["norm_epsilon"])

    def heads(x):
        return x.unflatten(-1, (-1, c["head_size"])).transpose(1, 2)

    x = p["embedding.weight"][ids]
    if gpt2:
        x = x + p["positions.weight"][: ids.shape[1]]
    for n in range(c["layers"]):
        layer = f"layers.{n}."
        y = norm(x, layer + "attention_norm")
        q, k, v = (heads(linear(y, layer + "attention." + part)) for part in "qkv")
        if not gpt2:
            if c["qk_norm"]:
                q = rms_norm(q, p[layer + "attention.q_norm.weight"], c["norm_epsilon"])
                k = rms_norm(k, p[layer + "attention.k_norm.weight"], c["norm_epsilon"])
            angles = rope_angles(c)
            q, k = rotate(q, angles), rotate(k, angles)
        x = x + linear(attention(q, k, v).transpose(1, 2).flatten(2), layer + "attention.o")
        y = norm(x, layer + "mlp_norm")
        if gpt2:
            y = torch.nn.functional.gelu(linear(y, layer + "mlp.up"), approximate="tanh")
        else:
            y = torch.nn.functional.silu(linear(y, layer + "mlp.gate")) * linear(y, layer + "mlp.up")
        x = x + linear(y, layer + "mlp.down")
    return norm(x, "norm") @ p["embedding.weight" if c["tied"] else "head.weight"].T


def make(name, c):
    torch.manual_seed(1234)
    parameters = initial_parameters(parameter_shapes(name, c))
    tokens = torch.randint(c["vocabulary"], (c["batch"], c["sequence"] + 1))
    entries = {f"config/{key}": [float(value)] for key, value in {**c, **OPTIMIZER}.items()}
    entries = {key: torch.tensor(value, dtype=torch.float64).numpy() for key, value in entries.items()}
    entries["tokens"] = tokens.int().numpy()

    def keep(prefix, pick):
        for key, value in parameters.items():
            entries[f"{prefix}/{key}"] = pick(value).detach().float().numpy()

    keep("initial", lambda x: x)
    o = OPTIMIZER
    adamw = torch.optim.AdamW(
        [{"params": [x for x in parameters.values() if x.ndim == 2], "weight_decay": o["weight_decay"]},
         {"params": [x for x in parameters.values() if x.ndim == 1], "weight_decay": 0.0}],
        lr=o["lr"], betas=(o["beta1"], o["beta2"]), eps=o["epsilon"])
    losses, norms = [], []
    for step in range(3):
        adamw.zero_grad()
        logits = forward(name, c, parameters, tokens[:, :-1])
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        if step == 0:
            keep("gradient", lambda x: x.grad)
        norm = math.sqrt(sum(x.grad.pow(2).sum().item() for x in parameters.values()))
        for x in parameters.values():
            x.grad *= min(1.0, o["clip"] / norm)
        adamw.step()
        losses.append(loss.item())
        norms.append(norm)
    keep("updated", lambda x: x)
    entries["loss"] = torch.tensor(losses, dtype=torch.float64).numpy()
    entries["gradient_norm"] = torch.tensor(norms, dtype=torch.float64).numpy()
    reference_file.write(HERE / f"model_{name}.ref", entries)
    print(f"model_{name}.ref: loss {losses}, gradient norm {norms}")


if __name__ == "__main__":
    for model, config in MODELS.items():
        make(model, config)
