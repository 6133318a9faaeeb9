"""Memory stays linear in the number of tokens; measured in a process of its own."""

import subprocess
import sys
import textwrap

import pytest

SETUP = """
import resource, torch, gossamer as gs
torch.set_num_threads(1)
peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
gs.sparse_attention(*[torch.randn(1, 1, 300, 32)] * 3, gs.BlockTopK())
"""


def peak_growth_mib(body: str) -> float:
    """Run `body` in a fresh process and return the number it prints: MiB of growth."""
    code = SETUP + textwrap.dedent(body)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return float(done.stdout)


@pytest.mark.parametrize("method", ["gs.BlockTopK(density=0.05)", "gs.InstaGen(density=0.05)"])
def test_a_long_sequence_builds_no_square(method: str) -> None:
    """40,000 tokens: the scores alone would be 6.4 GB a head."""
    grown = peak_growth_mib(
        f"""
        q = torch.randn(1, 1, 40000, 32)
        before = peak()
        gs.sparse_attention(q, q, q, {method})
        print(peak() - before)
        """
    )
    assert grown < 400


def test_a_key_mask_is_not_expanded() -> None:
    """20,000 keys, 8 heads: a float mask per head would be 25.6 GB."""
    grown = peak_growth_mib(
        """
        q = torch.randn(2, 8, 20000, 8)
        valid = torch.arange(20000).expand(2, -1) < 15000
        before = peak()
        gs.sparse_attention(q, q, q, gs.BlockTopK(density=0.02), gs.Call(key_valid=valid))
        print(peak() - before)
        """
    )
    assert grown < 400
