"""What the tests of planning share."""

from analysis.chips import Rates

# Constants that are easy to compute with: everything is reached, and hops take no time.
IDEAL = Rates(matmul=1.0, memory=1.0, link=1.0, hop_seconds=1e-12, spread=0.1)
