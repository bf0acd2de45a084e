"""JAX: a psum over the devices of all processes."""

import jax
import jax.numpy as jnp
import loop
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import stoker

stoker.jax_initialize()
mesh = Mesh(jax.devices(), "all")
together = jax.jit(
    jax.shard_map(lambda x: jax.lax.psum(x, "all"), mesh=mesh, in_specs=P("all"), out_specs=P())
)


def add(number):
    mine = jax.make_array_from_process_local_data(NamedSharding(mesh, P("all")), jnp.array([number]))
    return together(mine).addressable_data(0)[0]


loop.train(jax.process_index(), jax.process_count(), add)
jax.distributed.shutdown()
