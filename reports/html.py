"""The frame of the layout's page: its style, light, dark and printed."""

HEAD = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>TITLE</title>
<style>
:root { color-scheme: light dark; --ink: #1a1a1a; --paper: #fff; --line: #bbb; --mark: #f3ead2; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e4e4e4; --paper: #181a1c; --line: #555; --mark: #3d3620; }
}
@media print {
  :root { --ink: #000; --paper: #fff; --line: #888; --mark: #fff; }
  figure, tr { break-inside: avoid; }
}
body {
  margin: 0 auto; padding: 1rem 1.5rem 4rem; max-width: 82rem;
  color: var(--ink); background: var(--paper); font: 15px/1.45 system-ui, sans-serif;
}
h1 { font-size: 1.5rem; }
h2 { font-size: 1.15rem; margin: 2.2rem 0 .5rem; border-bottom: 2px solid var(--ink); }
h3, h4 { margin: .6rem 0 .2rem; font-size: 1rem; }
h4 { font-size: 13px; }
table { border-collapse: collapse; font: 12px/1.5 ui-monospace, Menlo, Consolas, monospace; }
th, td { text-align: left; vertical-align: top; padding: .1rem .7rem .1rem 0; white-space: nowrap; }
th { border-bottom: 1px solid var(--line); font-weight: 600; }
tr.differs td { background: var(--mark); font-weight: 700; }
tr.sum td { border-top: 1px solid var(--line); font-weight: 700; }
.wide { overflow-x: auto; }
.bar { display: inline-block; height: .7em; background: var(--ink); print-color-adjust: exact; }
details { margin: .5rem 0 1rem; }
summary { cursor: pointer; padding: .2rem 0; }
svg { display: block; height: auto; }
.module, .figures, .pair {
  display: flex; flex-wrap: wrap; gap: .8rem 1.2rem; align-items: flex-start;
}
.wide { max-width: 100%; }
.module td:first-child, .module td:last-child { white-space: normal; }
figure { margin: .3rem 0; padding: .4rem; border: 1px solid var(--line); max-width: 100%; }
figcaption { font-size: 13px; max-width: 28rem; overflow-wrap: anywhere; }
a { color: inherit; }
</style>
</head>
<body>
"""

# Folded parts would not be printed.
TAIL = """<script>
addEventListener("beforeprint", () => {
  for (const part of document.querySelectorAll("details")) part.open = true;
});
</script>
</body>
</html>
"""
