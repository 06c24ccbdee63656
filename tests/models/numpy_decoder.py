"""The decoder once more, in NumPy and float64, written from the papers: a reference for its values.

It shares nothing with the code that it is compared with but the names of the parameters and the
keys of the config. One row of tokens at a time, without batches, meshes, scans or blocks.
"""

import math
import re

import numpy as np


def logits(config, arrays, tokens_T, segments_T=None):
  """Returns float64 [T, V], V without padding.

  Args:
    config: finalized, of a transformer.
    arrays: name of a parameter -> array, those of the layers stacked.
    tokens_T: ids.
    segments_T: the document of each; None: all are one. Obeyed with model.separate_documents.
  """
  model, weights = config.model, in_float64(arrays)
  x_TD, _, _ = residual(config, weights, tokens_T, segments_T)
  return head(model, weights, norm(model, weights, "final_norm", x_TD))


def in_float64(arrays):
  """Returns name -> array."""
  return {name: np.asarray(array, np.float64) for name, array in arrays.items()}


def head(model, weights, x_TD):
  """Returns the logits of the normalized residual."""
  kernel_DV = weights["embed/table"].T if model.tied_embeddings else weights["unembed/kernel"]
  return capped((x_TD @ kernel_DV)[:, : model.vocabulary_size], model.logits_soft_cap)


def residual(config, weights, tokens_T, segments_T):
  """Returns the residual after the last layer; which slots each sees in its document; positions."""
  model, weights = config.model, dict(weights)
  for part, factor in model.multipliers:
    for name in weights:
      inputs = re.fullmatch(rf"[a-z_]*layers/{part}/(?!out)\w+/kernel", name)
      if inputs or re.fullmatch(rf"[a-z_]*layers/{part}/kernel", name):
        weights[name] = weights[name] * factor
  numbers_T = np.zeros_like(tokens_T)
  if model.separate_documents and segments_T is not None:
    numbers_T = np.asarray(segments_T)
  positions_T = np.array([np.sum(numbers_T[:i] == n) for i, n in enumerate(numbers_T)])
  slots_T = np.arange(len(tokens_T))
  x_TD = weights["embed/table"][tokens_T]
  if model.scaled_embeddings:
    x_TD = x_TD * math.sqrt(model.model_size)
  if model.positions == "learned":
    x_TD = x_TD + weights["positions/table"][positions_T]
  kinds = model.layer_types or ("full",)
  types = [kinds[number % len(kinds)] for number in range(model.layers)]
  for number in range(model.layers):
    sees_all = not model.window or (model.global_every and (number + 1) % model.global_every == 0)
    seen_TS = (slots_T[None] <= slots_T[:, None]) & (numbers_T[None] == numbers_T[:, None])
    if not sees_all:
      seen_TS &= slots_T[None] > slots_T[:, None] - model.window
    mixes = types[number] == "mixer"
    stack = "mixer_layers/" if mixes else "layers/"
    place = sum((one == "mixer") == mixes for one in types[:number])
    layer = {
      name.removeprefix(stack): array[place]
      for name, array in weights.items()
      if name.startswith(stack)
    }
    before, behind = model.pre_norms, model.post_norms
    if mixes and model.mixer_pre_norms:
      before, behind = True, False
    normed_TD = norm(model, layer, "attention_norm", x_TD) if before else x_TD
    attend = latent_attention if model.attention == "latent" else attention
    attend = MIXERS[model.mixer] if mixes else attend
    of_layer = {"sees_all": sees_all, "length": config.data.sequence_length}
    if model.attention_scale_by_inverse_layer:
      of_layer["depth"] = number + 1
    if mixes:
      of_layer["number"] = number
    read_TD = attend(model, layer, normed_TD, seen_TS, positions_T, **of_layer)
    if types[number] == "full_with_mixer":
      beside = {
        name.replace("mixer/", "attention/"): x for name, x in layer.items() if "mixer/" in name
      }
      read_TD = read_TD + MIXERS[model.mixer](model, beside, normed_TD, seen_TS, positions_T)
    x_TD = x_TD + (norm(model, layer, "attention_post_norm", read_TD) if behind else read_TD)
    update_TD = mlp(model, layer, norm(model, layer, "mlp_norm", x_TD) if before else x_TD)
    x_TD = x_TD + (norm(model, layer, "mlp_post_norm", update_TD) if behind else update_TD)
  return x_TD, seen_TS, positions_T


def loss_of_further_tokens(config, arrays, batch):
  """Returns the sum over depths and tokens of weighted cross-entropies, in nats.

  Layer n reads h[t] and the embedding of token t + n, and predicts token t + n + 1, if that is in
  the document of token t + 1 (arXiv:2412.19437, equations 21 to 25). Of full attention.
  """
  model, weights, total = config.model, in_float64(arrays), 0.0
  rows = zip(*(batch[x] for x in ("tokens", "targets", "weights", "segments")), strict=True)
  for tokens_T, targets_T, weights_T, segments_T in rows:
    x_TD, seen_TS, positions_T = residual(config, weights, tokens_T, segments_T)
    x_TD = norm(model, weights, "final_norm", x_TD)
    length = len(tokens_T)
    for number in range(model.mtp_layers):
      start = "mtp_layers/"
      layer = {k.removeprefix(start): x[number] for k, x in weights.items() if k.startswith(start)}
      # Token t + n is the target of slot t + n - 1; what the last slots read has no influence.
      later = targets_T[np.minimum(np.arange(length) + number, length - 1)]
      one_TD = norm(model, layer, "embedding_norm", weights["embed/table"][later])
      two_TD = norm(model, layer, "hidden_norm", x_TD)
      x_TD = one_TD @ layer["from_embedding/kernel"] + two_TD @ layer["from_hidden/kernel"]
      normed_TD = norm(model, layer, "attention_norm", x_TD)
      x_TD = x_TD + attention(
        model, layer, normed_TD, seen_TS, positions_T, sees_all=True, length=length
      )
      x_TD = x_TD + mlp(model, layer, norm(model, layer, "mlp_norm", x_TD))
      x_TD = norm(model, layer, "out_norm", x_TD)
      shares_TV = softmax(head(model, weights, x_TD))
      for t in range(length - number - 1):
        last = t + number + 1  # the slot whose target it is
        if segments_T[last] == segments_T[t]:
          total -= np.log(shares_TV[t, targets_T[last]]) * weights_T[last]
  return total


def loss(config, arrays, tokens_BT, targets_BT, weights_BT, segments_BT):
  """Returns the mean weighted cross-entropy of a batch, in nats."""
  total = 0.0
  rows = zip(tokens_BT, targets_BT, weights_BT, segments_BT, strict=True)
  for tokens_T, targets_T, weights_T, segments_T in rows:
    shares_TV = softmax(logits(config, arrays, tokens_T, segments_T))
    right_T = shares_TV[np.arange(len(targets_T)), targets_T]
    total -= np.sum(np.log(right_T) * weights_T)
  return total / np.sum(weights_BT, dtype=np.float64)


def softmax(x):
  """Returns the shares along the last dim."""
  x = np.exp(x - x.max(-1, keepdims=True))
  return x / x.sum(-1, keepdims=True)


def capped(x, cap):
  """Returns cap * tanh(x / cap), or x."""
  return cap * np.tanh(x / cap) if cap else x


def norm(model, weights, name, x):
  """Returns LayerNorm (arXiv:1607.06450) or RMSNorm (arXiv:1910.07467, equation 4)."""
  if model.norm == "layer":
    centred = x - x.mean(-1, keepdims=True)
    normed = centred / np.sqrt((centred**2).mean(-1, keepdims=True) + model.norm_epsilon)
    return normed * weights[f"{name}/scale"] + weights[f"{name}/bias"]
  return rms_norm(model, x, weights[f"{name}/scale"])


def rms_norm(model, x, scale, epsilon=None):
  """Returns x / rms(x) * scale, or * (1 + scale)."""
  epsilon = model.norm_epsilon if epsilon is None else epsilon
  scale = scale + 1 if model.norm_scale_from_one else scale
  return x / np.sqrt((x**2).mean(-1, keepdims=True) + epsilon) * scale


def attention(model, weights, x_TD, seen_TS, positions_T, depth=1, **of_layer):
  """Returns the update of grouped-query attention (arXiv:1706.03762, 3.2; arXiv:2305.13245)."""

  def heads(name):
    found = np.einsum("TD,DNH->TNH", x_TD, weights[f"attention/{name}/kernel"])
    found = found + weights.get(f"attention/{name}/bias", 0.0)
    scale = weights.get(f"attention/{name}_norm/scale")
    found = found if scale is None else rms_norm(model, found, scale)
    if model.clip_qkv:  # arXiv:2409.02060, of OLMoE
      found = np.minimum(np.maximum(found, -model.clip_qkv), model.clip_qkv)
    turns = model.positions == "rotary" and name != "value"
    return rotated(model, found, positions_T, **of_layer) if turns else found

  q_TNH, k_SKH, v_SKH = heads("query"), heads("key"), heads("value")
  mixed_TNH = np.zeros_like(q_TNH)
  scale = model.attention_scale / depth
  for n in range(model.heads):
    k = n // (model.heads // model.kv_heads)
    scores_TS = q_TNH[:, n] @ k_SKH[:, k].T * scale
    scores_TS = np.where(seen_TS, capped(scores_TS, model.attention_soft_cap), -np.inf)
    if "attention/sinks" in weights:  # a key that every token sees, without a value
      sink_T1 = np.full((len(scores_TS), 1), weights["attention/sinks"][n])
      scores_TS = np.concatenate([scores_TS, sink_T1], axis=1)
    mixed_TNH[:, n] = softmax(scores_TS)[:, : len(k_SKH)] @ v_SKH[:, k]
  out_TD = np.einsum("TNH,NHD->TD", mixed_TNH, weights["attention/out/kernel"])
  return out_TD + weights.get("attention/out/bias", 0.0)


def latent_attention(model, weights, x_TD, seen_TS, positions_T, **of_layer):
  """Returns the update of multi-head latent attention (arXiv:2405.04434, 2.1 and appendix C)."""

  def kernel(name):
    return weights[f"attention/{name}/kernel"]

  def normed(name, x):
    scale = weights[f"attention/{name}_norm/scale"]
    return rms_norm(model, x, scale, model.latent_norm_epsilon)

  def down(name):
    return x_TD @ kernel(name) + weights.get(f"attention/{name}/bias", 0.0)

  def turned(x_TNI):
    if model.rotary_pairs == "adjacent":  # pairs (2 i, 2 i + 1): brought to (i, i + I/2), and back
      halves = np.concatenate([x_TNI[..., 0::2], x_TNI[..., 1::2]], axis=-1)
      both = rotated(model, halves, positions_T, **of_layer)
      return np.stack(np.split(both, 2, axis=-1), axis=-1).reshape(x_TNI.shape)
    return rotated(model, x_TNI, positions_T, **of_layer)

  of_query = x_TD
  if model.query_latent_size:
    of_query = normed("query_latent", down("query_latent"))
  c_TC, shared_TI = normed("latent", down("latent")), down("rotary_key")
  rotary_TI = turned(shared_TI[:, None])[:, 0]
  mixed = []
  plain = model.head_size - model.rotary_size
  for n in range(model.heads):
    q_TH = of_query @ kernel("query")[:, n]
    q_TH = np.concatenate([q_TH[:, :plain], turned(q_TH[:, None, plain:])[:, 0]], axis=-1)
    both_SJ = c_TC @ kernel("key_value")[:, n]
    k_SH = np.concatenate([both_SJ[:, :plain], rotary_TI], axis=-1)
    scores_TS = capped(q_TH @ k_SH.T * model.attention_scale, model.attention_soft_cap)
    mixed.append(softmax(np.where(seen_TS, scores_TS, -np.inf)) @ both_SJ[:, plain:])
  out_TD = np.einsum("NTU,NUD->TD", np.stack(mixed), kernel("out"))
  return out_TD + weights.get("attention/out/bias", 0.0)


def rotated(model, x_TNH, positions_T, *, sees_all, length=0):
  """Returns x with each pair (i, i + H/2) turned by its position. Source: arXiv:2104.09864."""
  half = x_TNH.shape[-1] // 2
  local = model.local_rotary_base and not sees_all
  base = model.local_rotary_base if local else model.rotary_base
  frequency_h, factor = frequencies(() if local else model.rotary_scaling, 2 * half, base, length)
  turn_T1h = factor * np.exp(1j * positions_T[:, None, None] * frequency_h)
  turned = (x_TNH[..., :half] + 1j * x_TNH[..., half:]) * turn_T1h
  return np.concatenate([turned.real, turned.imag], axis=-1)


def frequencies(scaling, size, base, length):
  """Returns the angles of a step, [size / 2], and the factor of cosine and sine.

  Sources: the papers, and where they leave it open, `modeling_rope_utils` of transformers 5, whose
  length of the text is the row's here. `extrapolated` and `interpolated` are its names.

  Args:
    scaling: `model.rotary_scaling`.
    size: dims that are turned.
    base: of the geometric series.
    length: tokens of a row.
  """
  exponent_h = np.arange(0, size, 2) / size
  extrapolated_h = 1 / base**exponent_h
  if not scaling:
    return extrapolated_h, 1.0
  if not isinstance(scaling[0], str):
    names = ("factor", "low", "high", "original_length")
    scaling = "llama3", dict(zip(names, scaling, strict=True))
  kind, its = scaling
  factor, original = its.get("factor", 1.0), its.get("original_length")
  interpolated_h = extrapolated_h / factor
  if kind == "linear":
    return interpolated_h, 1.0
  if kind == "dynamic":
    longest = max(length, original)
    base = base * ((factor * longest / original) - (factor - 1)) ** (size / (size - 2))
    return 1 / base**exponent_h, 1.0
  if kind == "longrope":
    name = "long_factors" if length > original else "short_factors"
    grown = math.sqrt(1 + math.log(factor) / math.log(original))
    return 1 / (np.array(its[name]) * base**exponent_h), its.get("attention_factor", grown)
  if kind == "llama3":
    wavelength_h = 2 * math.pi / extrapolated_h
    share_h = (original / wavelength_h - its["low"]) / (its["high"] - its["low"])
    between_h = (1 - share_h) * interpolated_h + share_h * extrapolated_h
    slow_h, fast_h = wavelength_h > original / its["low"], wavelength_h < original / its["high"]
    found_h = np.where(slow_h, interpolated_h, between_h)
    return np.where(fast_h, extrapolated_h, found_h), 1.0
  assert kind == "yarn"

  def dim_of(rotations):
    return size * math.log(original / (rotations * 2 * math.pi)) / (2 * math.log(base))

  low, high = dim_of(its.get("beta_fast", 32)), dim_of(its.get("beta_slow", 1))
  low, high = max(math.floor(low), 0), min(math.ceil(high), size - 1)
  ramp_h = np.clip((np.arange(size // 2) - low) / (high - low), 0, 1)
  grown = 0.1 * math.log(factor) + 1
  found_h = interpolated_h * ramp_h + extrapolated_h * (1 - ramp_h)
  return found_h, its.get("attention_factor", grown)


def mlp(model, weights, x_TD):
  """Returns down(f(up(x))), or down(f(gate(x)) * up(x)) (arXiv:2002.05202)."""

  def act(x):
    if model.activation == "silu":
      return x / (1 + np.exp(-x))
    return x / 2 * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))

  up_TF = x_TD @ weights["mlp/up/kernel"] + weights.get("mlp/up/bias", 0.0)
  hidden_TF = act(x_TD @ weights["mlp/gate/kernel"]) * up_TF if model.gated else act(up_TF)
  return hidden_TF @ weights["mlp/down/kernel"] + weights.get("mlp/down/bias", 0.0)


def convolved(x_TX, taps_wX, positions_T):
  """Returns a causal convolution of each channel, whose last tap is the token's own."""
  out_TX = np.zeros_like(x_TX)
  for t, position in enumerate(positions_T):
    for back in range(min(position, len(taps_wX) - 1) + 1):
      out_TX[t] += taps_wX[-1 - back] * x_TX[t - back]
  return out_TX


def silu(x):
  """Returns x sigmoid(x)."""
  return x / (1 + np.exp(-x))


def recurrence(q, k, v, log_decay, strength, state, *, delta=True):
  """Returns outputs and the last state of one head's recurrence, token after token.

  Source: arXiv:2412.06464, equation 10, or without the delta rule 2405.21060. Of complex numbers
  too, whose imaginary parts are then derivatives.
  """
  out = []
  for t in range(len(k)):
    state = np.exp(log_decay[t]).reshape(-1, 1) * state
    read = k[t] @ state if delta else 0
    state = state + np.outer(k[t], strength[t] * (v[t] - read))
    out.append(q[t] @ state)
  return np.array(out), state


def kimi_delta(model, layer, x_TD, seen_TS, positions_T, **_):
  """Returns the update of a layer with Kimi Delta Attention (arXiv:2510.26692, equations 1, 10)."""
  of = {key.removeprefix("attention/").removesuffix("/kernel"): x for key, x in layer.items()}
  q, k, v = (
    silu(convolved(np.tensordot(x_TD, of[name], 1), of[f"{name}_taps"], positions_T))
    for name in ("query", "key", "value")
  )
  q, k = (x / np.sqrt((x * x).sum(-1, keepdims=True) + 1e-6) for x in (q, k))
  steps_TAh = np.tensordot(x_TD @ of["decay_latent"], of["decay"], 1) + of["step_bias"]
  log_decay_TAh = -np.exp(of["log_factor"])[:, None] * np.log1p(np.exp(steps_TAh))
  log_decay_TAh[positions_T == 0] = -np.inf
  strength_TA = 1 / (1 + np.exp(-x_TD @ of["strength"]))
  shared, state = v.shape[1] // k.shape[1], np.zeros((k.shape[2], v.shape[2]))
  heads = [
    recurrence(
      *(q[:, a // shared] * k.shape[2] ** -0.5, k[:, a // shared], v[:, a]),
      *(log_decay_TAh[:, a], strength_TA[:, a], state),
    )[0]
    for a in range(v.shape[1])
  ]
  out_TAu = np.stack(heads, axis=1)
  normed_TAu = out_TAu / np.sqrt((out_TAu**2).mean(-1, keepdims=True) + model.norm_epsilon)
  gate_TAu = 1 / (1 + np.exp(-np.tensordot(x_TD @ of["gate_latent"], of["gate"], 1)))
  return np.tensordot(normed_TAu * of["norm/scale"] * gate_TAu, of["out"], 2)


def gated_delta(model, layer, x_TD, seen_TS, positions_T, **_):
  """Returns the update of a layer with Gated DeltaNet (arXiv:2412.06464, as in Qwen3-Next)."""
  kernels = {name: layer[f"attention/{name}/kernel"] for name in ("query", "key", "value")}
  q, k, v = (
    silu(convolved(np.tensordot(x_TD, kernel, 1), layer[f"attention/{name}_taps"], positions_T))
    for name, kernel in kernels.items()
  )
  q, k = (x / np.sqrt((x * x).sum(-1, keepdims=True) + 1e-6) for x in (q, k))
  steps_TA = x_TD @ layer["attention/decay/kernel"] + layer["attention/step_bias"]
  log_decay_TA = -np.exp(layer["attention/log_factor"]) * np.log1p(np.exp(steps_TA))
  log_decay_TA[positions_T == 0] = -np.inf
  strength_TA = 1 / (1 + np.exp(-x_TD @ layer["attention/strength/kernel"]))
  strength_TA = strength_TA * (2 if model.mixer_negative_eigenvalues else 1)
  heads, shared = v.shape[1], v.shape[1] // k.shape[1]
  state = np.zeros((k.shape[2], v.shape[2]))
  out = np.stack(
    [
      recurrence(
        *(q[:, a // shared] * k.shape[2] ** -0.5, k[:, a // shared], v[:, a]),
        *(log_decay_TA[:, a], strength_TA[:, a], state),
      )[0]
      for a in range(heads)
    ],
    axis=1,
  )
  epsilon = model.mixer_norm_epsilon or model.norm_epsilon
  normed = out / np.sqrt((out * out).mean(-1, keepdims=True) + epsilon)
  gate = silu(np.tensordot(x_TD, layer["attention/gate/kernel"], 1))
  gated = normed * layer["attention/norm/scale"] * gate
  return np.tensordot(gated, layer["attention/out/kernel"], 2)


def mamba2(model, layer, x_TD, seen_TS, positions_T, **_):
  """Returns the update of a layer with Mamba-2 (arXiv:2405.21060, as in Bamba)."""
  q, k, v = (
    silu(
      convolved(
        np.tensordot(x_TD, layer[f"attention/{name}/kernel"], 1),
        *(layer[f"attention/{name}_taps"], positions_T),
      )
      + layer[f"attention/{name}_taps_bias"]
    )
    for name in ("query", "key", "value")
  )
  steps_TA = x_TD @ layer["attention/decay/kernel"] + layer["attention/step_bias"]
  steps_TA = np.log1p(np.exp(steps_TA))
  if model.mixer_step_limits:
    steps_TA = np.minimum(
      np.maximum(steps_TA, model.mixer_step_limits[0]), model.mixer_step_limits[1]
    )
  log_decay_TA = -np.exp(layer["attention/log_factor"]) * steps_TA
  log_decay_TA[positions_T == 0] = -np.inf
  out = np.zeros_like(v)
  of_group = v.shape[1] // k.shape[1]
  for a in range(v.shape[1]):
    given = q[:, a // of_group], k[:, a // of_group], v[:, a], log_decay_TA[:, a], steps_TA[:, a]
    state = np.zeros((k.shape[2], v.shape[2]))
    out[:, a] = recurrence(*given, state, delta=False)[0] + layer["attention/skip"][a] * v[:, a]
  gate = silu(np.tensordot(x_TD, layer["attention/gate/kernel"], 1))
  before = model.mixer_norm == "before_gate"
  gated = out if before else out * gate
  for g in range(k.shape[1]):
    group = gated[:, g * of_group : (g + 1) * of_group]
    mean = (group * group).mean((1, 2), keepdims=True)
    gated[:, g * of_group : (g + 1) * of_group] = group / np.sqrt(mean + model.norm_epsilon)
  gated = gated * layer["attention/norm/scale"] * (gate if before else 1)
  return np.tensordot(gated, layer["attention/out/kernel"], 2)


def lightning(model, layer, x_TD, seen_TS, positions_T, number, **_):
  """Returns the update of a layer with lightning attention (arXiv:2501.08313)."""
  q, k, v = (
    silu(np.tensordot(x_TD, layer[f"attention/{name}/kernel"], 1))
    for name in ("query", "key", "value")
  )
  heads, out = v.shape[1], np.zeros_like(v)
  of_layer = 1 - number / (model.layers - 1 + 1e-5) + 1e-5
  for a in range(heads):
    log_decay_T = np.where(positions_T == 0, -np.inf, -(2 ** (-8 * (a + 1) / heads)) * of_layer)
    g = a * k.shape[1] // heads
    given = q[:, g], k[:, g], v[:, a], log_decay_T, np.ones(len(x_TD))
    out[:, a], _ = recurrence(*given, np.zeros((k.shape[2], v.shape[2])), delta=False)
  normed = out / np.sqrt((out * out).mean((1, 2), keepdims=True) + 1e-6)
  gate = 1 / (1 + np.exp(-np.tensordot(x_TD, layer["attention/gate/kernel"], 1)))
  return np.tensordot(
    normed * layer["attention/norm/scale"] * gate, layer["attention/out/kernel"], 2
  )


def short_convolution(model, layer, x_TD, seen_TS, positions_T, **_):
  """Returns the update of a layer with a gated short convolution, as in LFM2."""
  before, after, x = (
    x_TD @ layer[f"attention/{name}/kernel"] for name in ("input_gate", "output_gate", "channels")
  )
  out = after * convolved(before * x, layer["attention/taps"], positions_T)
  return out @ layer["attention/out/kernel"]


MIXERS = {
  "gated_delta": gated_delta,
  "kimi_delta": kimi_delta,
  "mamba2": mamba2,
  "lightning": lightning,
  "short_convolution": short_convolution,
}
