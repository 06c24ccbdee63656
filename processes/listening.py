"""The listening sockets of process 0: at the coordinator's address, with a backlog for all."""

import contextlib
import ipaddress
import os
import resource
import socket

import psutil

from runtime.printable import printable

# JAX's variable for the address at which its coordination service listens, by default everywhere.
BIND_VARIABLE = "JAX_COORDINATOR_BIND_ADDRESS"
BACKLOG = 4096
_OTHER_FILES = 256  # open files in addition to one for each process


def split(address: str) -> tuple[str, int]:
  """Returns host and port of host:port; an IPv6 address is in brackets."""
  host, _, port = address.rpartition(":")
  return host.strip("[]"), int(port)


def bind_address(address: str) -> str | None:
  """Returns the host:port at which process 0 listens, and JAX's coordination service after it.

  Args:
    address: the coordinator's host:port.

  Returns:
    None for all addresses of the machine: where the name stands for several of its own or for none
    (address translation). Many systems resolve a machine's own name to a loopback address
    (127.0.1.1 on Debian), which other machines cannot reach: only `localhost` and literal addresses
    are listened for there.
  """
  if given := os.environ.get(BIND_VARIABLE):
    return given
  host, port = split(address)
  own = [
    ip for ip in _resolved(host) if _is_own(ip) and not ipaddress.ip_address(ip).is_unspecified
  ]
  if host == "localhost":
    own = own[:1]
  elif host not in own:
    own = [ip for ip in own if not ipaddress.ip_address(ip).is_loopback]
  if len(own) != 1:
    return None
  return f"[{own[0]}]:{port}" if ":" in own[0] else f"{own[0]}:{port}"


def _resolved(host: str) -> list[str]:
  try:
    found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
  except (OSError, UnicodeError):
    return []
  return [*dict.fromkeys(entry[4][0] for entry in found)]


def _is_own(ip: str) -> bool:
  """Returns whether a socket can listen at an address, which means that it is this machine's."""
  with contextlib.suppress(OSError), socket.socket(_family(ip)) as tried:
    tried.bind((ip, 0))
    return True
  return False


def _family(ip: str) -> socket.AddressFamily:
  return socket.AF_INET6 if ":" in ip else socket.AF_INET


def listen(address: str) -> socket.socket:
  """Returns a socket that listens at the coordinator's address.

  Raises:
    OSError: the port is in use.
  """
  host, port = split(bind_address(address) or f"[::]:{split(address)[1]}")
  if host == "::" and socket.has_dualstack_ipv6():
    how = {"family": socket.AF_INET6, "dualstack_ipv6": True}
  elif host == "::":
    host, how = "", {}
  else:
    how = {"family": _family(host)}
  found = socket.create_server((host, port), backlog=BACKLOG, **how)
  found.setblocking(False)
  return found


def free_port() -> int:
  """Returns a port that is free now; the run fails if another process takes it before."""
  with socket.socket() as found:
    found.bind(("", 0))
    return found.getsockname()[1]


def holder(port: int) -> str:
  """Returns which process has a port of this machine, for messages."""
  with contextlib.suppress(psutil.Error, OSError):
    found = [one for one in psutil.net_connections("tcp") if one.laddr and one.laddr[1] == port]
    found.sort(key=lambda one: one.status != psutil.CONN_LISTEN)
    for pid in (one.pid for one in found if one.pid):
      command = " ".join(psutil.Process(pid).cmdline())
      return f"process {pid}: {printable(command, newlines=False, longest=200)}"
  return "a process of another user or container; `ss -ltnp` as root names it"


def room_for(connections: int) -> str:
  """Raises the limit of open files as needed; returns why it cannot, or ""."""
  soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
  needed = connections + _OTHER_FILES
  if soft != resource.RLIM_INFINITY and needed > soft:
    try:
      resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))
    except (OSError, ValueError):
      return (
        f"process 0 needs {needed} open files for {connections} connections, and its hard limit is "
        f"{hard} (RLIMIT_NOFILE); raise it (`ulimit -Hn`, LimitNOFILE= of a service), or start "
        f"fewer processes"
      )
  return ""
