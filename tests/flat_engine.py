"""A stand-in for an engine of a vendor's image: vLLM's module names and ways of calling, of a Qwen3.5 checkpoint.

What matters to a recorder is as in vLLM: rows of tokens without a batch axis, linear layers that return (output, bias),
norms that add the residual stream and overwrite their arguments, layers that return two summands, the projections of
q, k, v, z in one, the gated delta rule as a module called with arguments by name, logits of the last token alone.

Runs by itself, on Python 3.8 and torch 1.10:

    python flat_engine.py CHECKPOINT IDS,IDS,... [DECODE] [--break-layer N] [--nan-layer N] [--fail-pass N]
"""

import argparse
import glob
import json
import os
import struct

import torch
import torch.nn.functional as F
from torch import nn

_TYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}


def read_weights(folder):
    """name -> tensor of all safetensors files of a folder, without the library, which old images lack."""
    found = {}
    for path in glob.glob(os.path.join(folder, "*.safetensors")):
        with open(path, "rb") as file:
            data = bytearray(file.read())
        (length,) = struct.unpack_from("<Q", data)
        header = json.loads(data[8 : 8 + length].decode("utf-8"))
        for name, entry in header.items():
            if name != "__metadata__":
                first, end = entry["data_offsets"]
                part = data[8 + length + first : 8 + length + end]
                found[name] = torch.frombuffer(part, dtype=_TYPES[entry["dtype"]]).reshape(entry["shape"])
    return found


class Linear(nn.Module):
    def __init__(self, *weights):
        super().__init__()
        self.weight = nn.Parameter(torch.cat(weights), requires_grad=False)

    def forward(self, x):
        return F.linear(x, self.weight), None


class FusedNorm(nn.Module):
    """Gemma's norm. With a residual stream it adds first and overwrites both arguments, as the fused kernel does."""

    def __init__(self, weight, eps):
        super().__init__()
        self.weight, self.eps = nn.Parameter(weight, requires_grad=False), eps

    def normalise(self, x):
        wide = x.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        return (wide * (1.0 + self.weight.float())).to(x.dtype)

    def forward(self, x, residual=None):
        if residual is None:
            return self.normalise(x)
        residual.copy_(residual + x)
        x.copy_(self.normalise(residual))
        return x, residual


class GatedNorm(nn.Module):
    def __init__(self, weight, eps):
        super().__init__()
        self.weight, self.eps = nn.Parameter(weight, requires_grad=False), eps

    def forward(self, x, gate):
        wide = x.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        return (self.weight * wide.to(x.dtype) * F.silu(gate.float())).to(x.dtype)


class DeltaRule(nn.Module):
    """out, state of the recurrence, token by token; q, k are normalised inside."""

    def forward(self, q, k, v, g, beta, initial_state, output_final_state=True, use_qk_l2norm_in_kernel=True):
        q, k = (x * torch.rsqrt(x.pow(2).sum(-1, keepdim=True) + 1e-6) for x in (q.float(), k.float()))
        repeats = v.shape[2] // q.shape[2]
        q, k = (x.repeat_interleave(repeats, dim=2)[0] for x in (q * q.shape[-1] ** -0.5, k))
        state, rows = initial_state[0].float(), []
        for token in range(v.shape[1]):
            state = state * g[0, token].float().exp()[:, None, None]
            read = torch.einsum("vkw,vk->vw", state, k[token])
            change = (v[0, token].float() - read) * beta[0, token].float()[:, None]
            state = state + k[token][:, :, None] * change[:, None, :]
            rows.append(torch.einsum("vkw,vk->vw", state, q[token]))
        return torch.stack(rows)[None].to(v.dtype), state[None]


class GatedDeltaNetAttention(nn.Module):
    gqa_interleaved_layout = False

    def __init__(self, weights, config):
        super().__init__()
        self.num_k_heads, self.num_v_heads = config["linear_num_key_heads"], config["linear_num_value_heads"]
        self.head_k_dim, self.head_v_dim = config["linear_key_head_dim"], config["linear_value_head_dim"]
        self.in_proj_qkvz = Linear(weights["in_proj_qkv.weight"], weights["in_proj_z.weight"])
        self.in_proj_ba = Linear(weights["in_proj_b.weight"], weights["in_proj_a.weight"])
        self.kernel = weights["conv1d.weight"]
        self.a_log, self.dt_bias = weights["A_log"], weights["dt_bias"]
        self.norm = GatedNorm(weights["norm.weight"], config["rms_norm_eps"])
        self.out_proj = Linear(weights["out_proj.weight"])
        self.chunk_gated_delta_rule = DeltaRule()
        self.window = torch.zeros(self.kernel.shape[0], self.kernel.shape[-1] - 1)
        self.state = torch.zeros(1, self.num_v_heads, self.head_k_dim, self.head_v_dim)

    def forward(self, hidden_states, output):
        tokens, key = len(hidden_states), self.num_k_heads * self.head_k_dim
        qkvz, _ = self.in_proj_qkvz(hidden_states)
        ba, _ = self.in_proj_ba(hidden_states)
        width = self.kernel.shape[0]
        qkv, z = qkvz[:, :width], qkvz[:, width:].reshape(tokens, self.num_v_heads, -1)
        b, a = ba.chunk(2, dim=-1)
        padded = torch.cat([self.window, qkv.t()], dim=1)
        self.window = padded[:, -self.window.shape[1] :].clone()
        qkv = F.silu(F.conv1d(padded[None], self.kernel, groups=width))[0].t()
        q, k = (x.reshape(1, tokens, self.num_k_heads, -1) for x in (qkv[:, :key], qkv[:, key : 2 * key]))
        v = qkv[:, 2 * key :].reshape(1, tokens, self.num_v_heads, -1)
        g = -self.a_log.float().exp() * F.softplus(a.float() + self.dt_bias)
        out, self.state = self.chunk_gated_delta_rule(
            q=q, k=k, v=v, g=g[None], beta=b.sigmoid()[None], initial_state=self.state, output_final_state=True
        )
        out = self.norm(out.reshape(-1, self.head_v_dim), z.reshape(-1, self.head_v_dim))
        output[:tokens], _ = self.out_proj(out.reshape(tokens, -1))


class Attention(nn.Module):
    """vLLM's attention layer: rows in, rows out, the cache inside."""

    def __init__(self, heads, kv_heads, size):
        super().__init__()
        self.heads, self.kv_heads, self.size, self.cache = heads, kv_heads, size, None

    def forward(self, query, key, value):
        tokens = len(query)
        k, v = (x.reshape(tokens, self.kv_heads, self.size) for x in (key, value))
        if self.cache is not None:
            k, v = torch.cat([self.cache[0], k]), torch.cat([self.cache[1], v])
        self.cache = k, v
        q = query.reshape(tokens, self.heads, self.size).transpose(0, 1)
        k, v = (x.repeat_interleave(self.heads // self.kv_heads, dim=1).transpose(0, 1) for x in (k, v))
        scores = q @ k.transpose(1, 2) * self.size**-0.5
        hidden = torch.ones(tokens, k.shape[1], dtype=torch.bool).triu(k.shape[1] - tokens + 1)
        weights = scores.masked_fill(hidden, float("-inf")).softmax(-1, dtype=torch.float32).to(q.dtype)
        return (weights @ v).transpose(0, 1).reshape(tokens, -1)


class Rotary(nn.Module):
    def __init__(self, size, share, theta):
        super().__init__()
        self.size, self.width, self.theta = size, int(size * share), theta

    def forward(self, positions, query, key):
        steps = self.theta ** -(torch.arange(0, self.width, 2).float() / self.width)
        angle = positions.float()[:, None, None] * steps
        cos, sin = angle.cos(), angle.sin()

        def turn(x):
            heads = x.reshape(len(positions), -1, self.size)
            one, other = heads[..., : self.width // 2], heads[..., self.width // 2 : self.width]
            turned = torch.cat([one * cos - other * sin, other * cos + one * sin, heads[..., self.width :]], dim=-1)
            return turned.reshape(x.shape).to(x.dtype)

        return turn(query), turn(key)


class Qwen3NextAttention(nn.Module):
    def __init__(self, weights, config):
        super().__init__()
        self.num_heads, self.num_kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
        self.head_dim = config["head_dim"]
        self.q_size, self.kv_size = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        self.qkv_proj = Linear(*(weights[name + "_proj.weight"] for name in "qkv"))
        self.o_proj = Linear(weights["o_proj.weight"])
        self.q_norm, self.k_norm = (FusedNorm(weights[name], config["rms_norm_eps"])
                                    for name in ("q_norm.weight", "k_norm.weight"))  # fmt: skip
        rope = config["rope_parameters"]
        self.rotary_emb = Rotary(self.head_dim, rope["partial_rotary_factor"], rope["rope_theta"])
        self.attn = Attention(self.num_heads, self.num_kv_heads, self.head_dim)

    def forward(self, positions, hidden_states):
        tokens = len(hidden_states)
        qkv, _ = self.qkv_proj(hidden_states)
        q_gate, k, v = qkv.split([2 * self.q_size, self.kv_size, self.kv_size], dim=-1)
        q, gate = q_gate.reshape(tokens, self.num_heads, -1).chunk(2, dim=-1)
        q = self.q_norm(q).reshape(tokens, -1)
        k = self.k_norm(k.reshape(tokens, self.num_kv_heads, -1)).reshape(tokens, -1)
        q, k = self.rotary_emb(positions, q, k)
        out, _ = self.o_proj(self.attn(q, k, v) * gate.reshape(tokens, -1).sigmoid())
        return out


class SharedExpert(nn.Module):
    def __init__(self, weights, expert_gate):
        super().__init__()
        self.gate_up_proj = Linear(weights["gate_proj.weight"], weights["up_proj.weight"])
        self.down_proj, self.expert_gate = Linear(weights["down_proj.weight"]), expert_gate

    def forward(self, x):
        gate, up = self.gate_up_proj(x)[0].chunk(2, dim=-1)
        return self.expert_gate(x)[0].sigmoid() * self.down_proj(F.silu(gate) * up)[0]


class FusedMoE(nn.Module):
    """(shared, routed) of all experts."""

    def __init__(self, weights, top_k, shared):
        super().__init__()
        self.w13, self.w2 = weights["experts.gate_up_proj"], weights["experts.down_proj"]
        self.top_k, self._shared_experts = top_k, shared

    def forward(self, hidden_states, router_logits):
        shared = self._shared_experts(hidden_states)
        chances, chosen = router_logits.softmax(-1, dtype=torch.float32).topk(self.top_k, dim=-1)
        chances = (chances / chances.sum(-1, keepdim=True)).to(hidden_states.dtype)
        routed = torch.zeros_like(hidden_states)
        for token, x in enumerate(hidden_states):
            for chance, expert in zip(chances[token], chosen[token].tolist()):  # noqa: B905  no `strict` in Python 3.8
                gate, up = (self.w13[expert] @ x).chunk(2)
                routed[token] += chance * (self.w2[expert] @ (F.silu(gate) * up))
        return shared, routed


class SparseBlock(nn.Module):
    def __init__(self, weights, config):
        super().__init__()
        self.gate = Linear(weights["gate.weight"])
        self.shared_expert_gate = Linear(weights["shared_expert_gate.weight"])
        self.shared_expert = SharedExpert(_below(weights, "shared_expert."), self.shared_expert_gate)
        self.experts = FusedMoE(weights, config["num_experts_per_tok"], self.shared_expert)

    def forward(self, hidden_states):
        logits, _ = self.gate(hidden_states)
        shared, routed = self.experts(hidden_states=hidden_states, router_logits=logits)
        return shared + routed


class DecoderLayer(nn.Module):
    def __init__(self, weights, config, kind):
        super().__init__()
        eps, self.kind = config["rms_norm_eps"], kind
        if kind == "linear_attention":
            self.linear_attn = GatedDeltaNetAttention(_below(weights, "linear_attn."), config)
        else:
            self.self_attn = Qwen3NextAttention(_below(weights, "self_attn."), config)
        self.mlp = SparseBlock(_below(weights, "mlp."), config)
        self.input_layernorm = FusedNorm(weights["input_layernorm.weight"], eps)
        self.post_attention_layernorm = FusedNorm(weights["post_attention_layernorm.weight"], eps)

    def forward(self, positions, hidden_states, residual):
        if residual is None:
            residual = hidden_states.clone()
            hidden_states = self.input_layernorm(hidden_states)
        else:
            hidden_states, residual = self.input_layernorm(hidden_states, residual)
        if self.kind == "linear_attention":
            out = torch.empty_like(hidden_states)
            self.linear_attn(hidden_states, out)
        else:
            out = self.self_attn(positions=positions, hidden_states=hidden_states)
        hidden_states, residual = self.post_attention_layernorm(out, residual)
        return self.mlp(hidden_states), residual


class Stem(nn.Module):
    def __init__(self, weights, config):
        super().__init__()
        self.embed_tokens = nn.Embedding.from_pretrained(weights["embed_tokens.weight"])
        self.layers = nn.ModuleList(
            DecoderLayer(_below(weights, f"layers.{number}."), config, kind)
            for number, kind in enumerate(config["layer_types"])
        )
        self.norm = FusedNorm(weights["norm.weight"], config["rms_norm_eps"])

    def forward(self, input_ids, positions):
        hidden_states, residual = self.embed_tokens(input_ids), None
        for layer in self.layers:
            hidden_states, residual = layer(positions=positions, hidden_states=hidden_states, residual=residual)
        return self.norm(hidden_states, residual)[0]


class LogitsProcessor(nn.Module):
    def forward(self, head, hidden_states):
        return F.linear(hidden_states, head.weight)


class Language(nn.Module):
    def __init__(self, weights, config):
        super().__init__()
        self.model = Stem(_below(weights, "model.language_model."), config)
        self.lm_head = Linear(weights["lm_head.weight"])
        self.logits_processor = LogitsProcessor()

    def forward(self, input_ids, positions):
        return self.model(input_ids, positions)


class Qwen3_5ForConditionalGeneration(nn.Module):
    def __init__(self, folder):
        super().__init__()
        with open(os.path.join(folder, "config.json"), encoding="utf-8") as file:
            config = json.load(file)["text_config"]
        self.language_model = Language(read_weights(folder), config)

    def forward(self, input_ids, positions, intermediate_tensors=None):
        return self.language_model(input_ids, positions)

    def compute_logits(self, hidden_states):
        return self.language_model.logits_processor(self.language_model.lm_head, hidden_states)


def _below(weights, prefix):
    return {name[len(prefix) :]: x for name, x in weights.items() if name.startswith(prefix)}


@torch.no_grad()
def generate(model, ids, decode):
    """The prompt in one pass, then one token a pass, the likeliest each time; all tokens."""
    ids, fresh = list(ids), list(ids)
    for step in range(decode + 1):
        positions = torch.arange(len(ids) - len(fresh), len(ids))
        hidden = model(input_ids=torch.tensor(fresh), positions=positions)
        if step < decode:
            fresh = [int(model.compute_logits(hidden[-1:]).argmax())]
            ids += fresh
    return ids


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("checkpoint")
    parser.add_argument("ids")
    parser.add_argument("decode", type=int, nargs="?", default=0)
    parser.add_argument("--break-layer", type=int, help="double what this layer's experts give")
    parser.add_argument("--nan-layer", type=int, help="a NaN in one value of this layer's queries")
    parser.add_argument("--fail-pass", type=int, help="raise in the experts of layer 1 in this pass")
    options = parser.parse_args()
    torch.set_num_threads(1)
    model = Qwen3_5ForConditionalGeneration(options.checkpoint)
    layers = model.language_model.model.layers
    if options.break_layer is not None:
        layers[options.break_layer].mlp.experts.w2 *= 2
    if options.nan_layer is not None:
        layers[options.nan_layer].linear_attn.in_proj_qkvz.weight[3, 5] = float("nan")
    if options.fail_pass is not None:
        experts, calls = layers[1].mlp.experts, []
        forward = experts.forward

        def failing(hidden_states, router_logits):
            calls.append(1)
            if len(calls) == options.fail_pass + 1:
                raise RuntimeError("vendor error 719: unspecified launch failure")
            return forward(hidden_states, router_logits)

        experts.forward = failing
    print(generate(model, [int(part) for part in options.ids.split(",")], options.decode))


if __name__ == "__main__":
    main()
