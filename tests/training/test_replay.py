"""A replayed step: its numbers are NumPy's and the step's, and what is bad is found by its name."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from models.attention import Attend
from models.spec import STACKS
from partitioning.rules import named_leaves
from tests.helpers.jobs import first_state, host_batch, make_job, place
from training import coordinate_check, replay

ROW, TOKEN = 5, 60  # the only row with this token
LAYERS = [f"layer {i}: {what}" for i in (1, 2) for what in ("attention", "mlp", "residual")]


@pytest.fixture(scope="module")
def job():
  """Returns a decoder of two layers on a mesh, whose step has two microbatches."""
  return make_job("dp4_tp2", "lm", **{"training.gradient_accumulation_steps": 2})


@pytest.fixture(scope="module")
def look(job):
  """Returns a function from changes of parameters to what a replay observes; compiled once."""
  observe = replay.compile_observer(job, job.batch)

  def of(**changes):
    state, batch = first_state(job), batch_of(job)
    leaves = {name: np.array(x) for name, x in named_leaves(state.params).items()}
    for name, change in changes.items():
      change(leaves[name])
    structure = jax.tree.structure(state.params)
    params = jax.tree.unflatten(structure, list(leaves.values()))
    params = jax.device_put(params, job.state_shardings.params)
    return observe(dataclasses.replace(state, params=params), place(job, batch))

  return of


def batch_of(job):
  batch = host_batch(job)
  batch["tokens"] = np.where(batch["tokens"] == TOKEN, TOKEN - 1, batch["tokens"])
  batch["tokens"][ROW, 3] = TOKEN
  return batch


def by_layer(tree):
  """Returns name -> parameter, each layer's by itself."""
  found = {}
  for name, x in named_leaves(jax.device_get(tree)).items():
    if name.startswith("layers/"):
      found |= {f"layer {i + 1}: {name[7:]}": layer for i, layer in enumerate(x)}
    else:
      found[name] = x
  return found


def rows(array):
  return np.flatnonzero(array.bad).tolist()


def bad(arrays):
  return [one.name for one in arrays if not one.finite]


def test_a_clean_step_has_the_numbers_of_the_step_and_of_numpy(job, look):
  found = look()
  assert [one.name for one in found.activations] == ["embedding", *LAYERS, "logits"]
  everything = found.parameters, found.activations, found.gradients, found.updated
  assert [bad(arrays) for arrays in everything] == [[], [], [], []]
  state, batch = first_state(job), batch_of(job)
  table = np.asarray(named_leaves(state.params)["embed/table"], np.float64)[batch["tokens"]]
  assert found.activations[0].rms == pytest.approx(np.sqrt(np.mean(table**2)), rel=1e-6)
  assert found.activations[0].largest == pytest.approx(np.abs(table).max(), rel=1e-6)
  both = job.compile(
    job.program.step_and_gradients,
    *(state, place(job, batch)),
    in_shardings=(job.state_shardings, job.batch_shardings),
  ).function
  after, metrics, grads = both(state, place(job, batch))
  weights_B = batch["weights"].sum(1)
  mean = (found.losses * weights_B).sum() / weights_B.sum()
  assert mean == pytest.approx(float(metrics["loss"]), rel=1e-6)
  for arrays, tree in ((found.gradients, grads), (found.updated, after.params)):
    wanted = by_layer(tree)
    assert {one.name for one in arrays} == wanted.keys()
    for one in arrays:
      assert one.rms == pytest.approx(np.sqrt(np.mean(wanted[one.name] ** 2.0)), rel=1e-4), one.name
      assert one.largest == pytest.approx(np.abs(wanted[one.name]).max(), rel=1e-4), one.name
      assert one.elements == wanted[one.name].size


def test_gradients_are_in_backward_order(look):
  names = [one.name for one in look().gradients]
  layer = names.index("layer 1: mlp/down/kernel")
  assert names[:3] == ["unembed/kernel", "final_norm/scale", "layer 2: mlp/down/kernel"]
  assert names.index("layer 2: attention_norm/scale") < layer
  assert names[-2:] == ["layer 1: attention_norm/scale", "embed/table"]


def test_a_token_whose_embedding_is_not_finite_is_found_in_its_row(look):
  def poison(table):
    table[TOKEN, 2:] = np.inf

  found = look(**{"embed/table": poison})
  assert bad(found.parameters) == ["embed/table"]
  table, first = found.parameters[0], found.activations[0]
  assert (table.name, int(table.bad.sum()), table.first) == ("embed/table", 38, (TOKEN, 2))
  assert (first.name, rows(first), first.first) == ("embedding", [ROW], (ROW, 3, 2))
  assert first.value == np.inf
  assert np.flatnonzero(~np.isfinite(found.losses)).tolist() == [ROW]


def test_an_overflow_in_one_layer_is_found_there_and_in_all_rows(look):
  def scale(up):
    up[1] *= 1e37  # finite, and 40 of its products are not

  found = look(**{"layers/mlp/up/kernel": scale, "layers/mlp/gate/kernel": scale})
  assert bad(found.parameters) == []
  assert bad(found.activations) == ["layer 2: mlp", "layer 2: residual", "logits"]
  assert found.activations[5].name == "layer 2: mlp"
  assert rows(found.activations[5]) == list(range(16))
  assert bad(found.gradients)[0] == "unembed/kernel"


@jax.custom_vjp
def wrong_backward(x):
  """An identity whose gradient is 0 / 0."""
  return x


wrong_backward.defvjp(lambda x: (x, ()), lambda _, g: (g * jnp.nan,))


def test_an_own_kernel_with_a_wrong_gradient_is_found_although_the_loss_is_finite(monkeypatch):
  attend = Attend.__call__
  own = lambda *args, **more: wrong_backward(attend(*args, **more))  # noqa: E731
  monkeypatch.setattr(Attend, "__call__", own)
  job = make_job("single", "lm")
  observe = replay.compile_observer(job, job.batch)
  found = observe(first_state(job), place(job, batch_of(job)))
  assert (bad(found.activations), bool(np.isfinite(found.losses).all())) == ([], True)
  kernels = ["value", "key", "query"]  # what the kernel has read: not `out`, which reads it
  assert bad(found.gradients)[:3] == [f"layer 2: attention/{name}/kernel" for name in kernels]
  assert [one.name for one in found.updated if one.finite] == []


def test_the_size_of_a_finite_array_is_finite_although_its_squares_are_not():
  numbers = replay._numbers(jnp.array([[3e30, -4e30], [0, 0]], jnp.float32))
  assert float(numbers["rms"]) == pytest.approx(2.5e30)
  assert (float(numbers["largest"]), numbers["bad"].tolist()) == (pytest.approx(4e30), [0, 0])
  assert float(replay._numbers(jnp.zeros((2, 2)))["rms"]) == 0


@pytest.mark.long
@pytest.mark.parametrize(
  "keys",
  [
    {"training.matmul_dtype": "float8", "training.matmul_scaling": "delayed"},
    {"model.experts": 4, "model.expert_feedforward_size": 24, "training.balance_loss": 0.01},
    {"model.dropout_rate": 0.1, "training.gradient_accumulation_steps": 4},
    {"training.trainable": ("layers/mlp/*",), "optimizer.name": "schedule_free_adamw"},
    {"lora.rank": 3},
  ],
  ids=str,
)
def test_losses_and_gradients_are_those_of_the_step(keys):
  job = make_job("single", "lm", **keys)
  given = host_batch(job)
  state, batch, weights_B = first_state(job), place(job, given), given["weights"].sum(1)
  found = replay.compile_observer(job, job.batch)(state, batch)
  _, metrics = job.compile_train_step().function(state, batch)
  norm = np.sqrt(sum(one.rms**2 * one.elements for one in found.gradients))
  assert norm == pytest.approx(float(metrics["grad_norm"]), rel=1e-4)
  mean = (found.losses * weights_B).sum() / weights_B.sum()
  assert mean == pytest.approx(float(metrics["loss"]), rel=1e-5)


SPARSE = ("attention", "router", "mlp", "residual")
DENSE = ("attention", "mlp", "residual")
EXPERTS = {"model.experts": 4, "model.dense_layers": 1, "model.expert_feedforward_size": 24}
MIXERS = {"model.mixer": "mamba2", "model.layer_types": ("mixer", "full")}
ONE_PART = {**MIXERS, "model.layer_types": ("mixer", "mlp", "full")}


@pytest.mark.parametrize(
  ("keys", "layers"),
  [
    ({**EXPERTS, **MIXERS}, (DENSE, SPARSE, SPARSE)),  # a dense mixer, attention, a sparse mixer
    (ONE_PART, (("attention", "residual"), ("mlp", "residual"), ("attention", "residual"))),
  ],
)
def test_layers_of_all_stacks_are_in_the_order_of_the_model(keys, layers):
  job = make_job("single", "lm", **keys, **{"model.layers": 3})
  with job.tracing():
    recorded = jax.eval_shape(
      lambda *given: coordinate_check.activations_of(job.program, *given), job.state, job.batch
    )
  tails = {"bad": (2,), "row_shape": (1,), "at": (), "rms": (), "largest": (), "value": ()}
  given = {}
  for name, x in recorded.items():
    layers_of_stack = x.shape[: f"{name.partition('/')[0]}/" in STACKS.values()]
    given[name] = {key: np.zeros((1, *layers_of_stack, *tail), int) for key, tail in tails.items()}
  found = [one.name for one in replay._in_order(job.config.model, *replay._activations(given))]
  wanted = [f"layer {i}: {what}" for i, each in enumerate(layers, 1) for what in each]
  assert found == ["embedding", *wanted, "logits"]


@pytest.mark.parametrize(
  ("sizes", "task", "said"),
  [({"stage": 2}, "causal_lm", "mesh.stage=2: a replay"), ({}, "dpo", "the task dpo: a replay")],
)
def test_what_cannot_be_replayed_is_refused(sizes, task, said):
  with pytest.raises(ValueError, match=said):
    replay.check(task, sizes)
