"""What is read of replies: by our own parsers, and by the paper's, whose vectors others took from its scripts.

None is no verdict and no number, where the paper's scripts take a default: A, 0.5, or 0 for a list.
"""

import pytest

from prb_jax.judges.pairs import read_verdict
from prb_jax.judges.paper import paper_list, paper_number, paper_verdict
from prb_jax.judges.ratings import Scale

READ = {
    paper_verdict: {
        "Result: Answer B": "A", "Result: Both": "B", "The result: B wins. Result: A": "B", "<think> Result: B": "B",
        "Result: [B]": None, "Result: <B>": None, "Result: Response B": None, "result : B": None, "Result: `B`": None,
        '**Result:** "B"': "B", "<think>Result: B</think> Result: A": "A", "": None,
    },
    read_verdict: {
        "A": "A", " **b**. ": "B", "Verdict: A, no.\nVerdict: **B**": "B", "<think>A</think>B": "B",
        "<think> Verdict: A": None, "Both": None, "Answer A is fine": None, "Verdict: Both": None, "": None,
    },
    paper_number: {
        "0.8": 0.8, "7": 1.0, "Score: 7": None, "8/10": 1.0, "85%": None, "20 pts": 0.0, "12 pts": 1.0,
        "3.14 pts": 0.14, "[2, 2, 2]": None, "[2, 1, 0]": 1.0, "[0, 2]": 0.0, "-3": 0.0, "nan": 1.0, "inf": 1.0,
        "": None, " 0.25\n": 0.25,
    },
    paper_list: {
        "[2, 1, 0]": 1.0, "[2, 1": 1.5, "Aspect 1: 2": 1.5, "[a] [2]": None, "[[2,1],[0]]": 1.5, "[2-1]": 0.5,
        "[-1]": -1.0, "none": None, "": None,
    },
    Scale().read: {
        "7": 7, " **8**. ": 8, "7.5": 7.5, "I give 7 out of 9.": 7, "7/9": 7, "Score: 7/9": 7,
        "It has 3 parts.\nScore: **6**": 6, "Score: 2. No: Score: 4": 4, "<think>3</think>5": 5, "0": None, "10": None,
        "-3": None, "85%": None, "3 or 4": None, "Score: 7/10": None, "<think> Score: 3": None, "good": None,
        "": None, "nan": None, "Score: 75%": None,
    },
}  # fmt: skip


@pytest.mark.parametrize("read", READ)
def test_what_is_read_of_a_reply(read):
    assert {reply: read(reply) for reply in READ[read]} == pytest.approx(READ[read])
