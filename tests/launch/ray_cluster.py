"""A Ray cluster on this machine, for the Python of `make ray`.

Prints its address when both nodes have joined. Each line of standard input kills a node and adds
another one, as a loss of power and a replacement do; its end ends the cluster.
"""

import sys

from ray.cluster_utils import Cluster

CPUS = 2  # of each node

if __name__ == "__main__":
  cluster = Cluster(
    initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False}
  )
  node, _ = [cluster.add_node(num_cpus=CPUS) for _ in range(2)]
  cluster.wait_for_nodes(timeout=300)
  print(f"address {cluster.address}", flush=True)
  for line in sys.stdin:
    cluster.remove_node(node, allow_graceful=False)
    node = cluster.add_node(num_cpus=CPUS)
    print(line.strip(), "done", flush=True)
  cluster.shutdown()
