"""A bucket: the part of Cloud Storage's JSON protocol that TensorStore uses, with generations."""

import contextlib
import http.server
import json
import threading
import urllib.parse


class Bucket:
  """A server on this machine; a context manager.

  Attributes:
    url: of the server.
    objects: name -> (generation, content).
    refused: how many writes were refused because of their condition.
  """

  def __init__(self):
    self.objects: dict[str, tuple[int, bytes]] = {}
    self.refused, self._generation = 0, 0
    self._changing = threading.Lock()
    bucket = self

    class Handler(http.server.BaseHTTPRequestHandler):
      protocol_version, disable_nagle_algorithm, wbufsize = "HTTP/1.1", True, -1

      def log_message(self, *arguments):
        """Prints nothing."""

      def do_GET(self):
        parts = urllib.parse.urlsplit(self.path)
        query = dict(urllib.parse.parse_qsl(parts.query))
        name = parts.path.partition("/o/")[2]
        self._answer(*(bucket.get(name, query) if name else bucket.list(query)))

      def do_POST(self):
        query = dict(urllib.parse.parse_qsl(urllib.parse.urlsplit(self.path).query))
        content = self.rfile.read(int(self.headers["Content-Length"]))
        self._answer(*bucket.put(query["name"], content, query))

      def do_DELETE(self):
        name = urllib.parse.urlsplit(self.path).path.partition("/o/")[2]
        self._answer(*bucket.delete(name))

      def _answer(self, code, content, headers=None):
        self.send_response(code)
        self.send_header("Content-Length", str(len(content)))
        for key, value in (headers or {}).items():
          self.send_header(key, value)
        self.end_headers()
        with contextlib.suppress(OSError):
          self.wfile.write(content)

    self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
    self._thread = threading.Thread(target=self._server.serve_forever)

  def __enter__(self):
    self._thread.start()
    return self

  def __exit__(self, *error):
    self._server.shutdown()
    self._thread.join()
    self._server.server_close()

  def get(self, name, query):
    """Returns an object's content, with its generation."""
    with self._changing:
      found = self.objects.get(urllib.parse.unquote(name))
    if found is None:
      return 404, b"{}"
    generation, content = found
    if query.get("ifGenerationNotMatch") == str(generation):
      return 304, b""
    return 200, content, {"x-goog-generation": str(generation)}

  def list(self, query):
    """Returns the names from `startOffset` on and before `endOffset`."""
    first, end = query.get("startOffset", ""), query.get("endOffset", "\U0010ffff")
    assert {*query} <= {"startOffset", "endOffset", "fields", "maxResults"}, query
    with self._changing:
      names = sorted(name for name in self.objects if first <= name < end)
    return 200, json.dumps({"items": [{"name": name} for name in names]}).encode()

  def put(self, name, content, query):
    """Writes an object, if its generation is the one that is asked for; 0 where there is none."""
    with self._changing:
      there = self.objects.get(name, (0, b""))[0]
      if query.get("ifGenerationMatch", str(there)) != str(there):
        self.refused += 1
        return 412, b"{}"
      self._generation += 1
      self.objects[name] = (self._generation, content)
      return 200, json.dumps({"name": name, "generation": str(self._generation)}).encode()

  def delete(self, name):
    """Removes an object."""
    with self._changing:
      there = self.objects.pop(urllib.parse.unquote(name), None)
    return (404 if there is None else 204), b""
