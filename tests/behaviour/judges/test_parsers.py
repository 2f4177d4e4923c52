"""What is read of replies: by our own parsers, and by the paper's, whose vectors others took from its scripts.

None is no verdict and no number, where the paper's scripts take a default: A, 0.5, or 0 for a list.
"""

from pathlib import Path

import pytest

from prb_jax.behaviour.judges.formats import read_brackets, read_judgement, read_scores
from prb_jax.behaviour.judges.paper import paper_list, paper_number, paper_verdict
from prb_jax.behaviour.judges.replies import read_verdict, without_thoughts
from prb_jax.behaviour.judges.scale import Scale
from tests.json_lines import read_lines

THOUGHTS = {
    "<think>": "</think>", "<thinking>": "</thinking>", "<Thought>": "</Thought>", "<reasoning>": "</reasoning>",
    "<scratchpad>": "</scratchpad>", "<reflection>": "</reflection>",
    "<seed:think>": "</seed:think>", "[THINK]": "[/THINK]", "<|channel>thought\n": "<channel|>",
    "<|channel|>analysis<|message|>": "<|end|><|start|>assistant<|channel|>final<|message|>",
    "<internal_reasoning>": "</internal_reasoning>", "<chain_of_thought>": "</chain_of_thought>", "<cot>": "</cot>",
    "<|begin_of_thought|>": "<|end_of_thought|>", "<|think|>": "<|/think|>", "[BEGIN THOUGHT]": "[END THOUGHT]",
    "<unused94>thought": "<unused95>", "Thinking...\n": "...done thinking.",
    "<|channel|>commentary<|message|>": "<|end|><|start|>assistant<|channel|>final<|message|>",
    "◁think▷": "◁/think▷", "<|START_THINKING|>": "<|END_THINKING|>", "analysisWell,": "assistantfinal",
}  # fmt: skip

READ = {
    paper_verdict: {
        "Result: Answer B": "A", "Result: Both": "B", "The result: B wins. Result: A": "B", "<think> Result: B": "B",
        "Result: [B]": None, "Result: <B>": None, "Result: Response B": None, "result : B": None, "Result: `B`": None,
        '**Result:** "B"': "B", "<think>Result: B</think> Result: A": "A", "": None,
    },
    read_verdict: {
        "A": "A", " **b**. ": "B", "Verdict: A, no.\nVerdict: **B**": "B", "<think>A</think>B": "B",
        "<think> Verdict: A": None, "Both": None, "Answer A is fine": None, "Verdict: Both": None, "": None,
        "Verdict: it is a tie": None, "Verdict: A tie.": None, "Verdict - a draw": None, "Verdict: neither": None,
        "Verdict: no clear winner": None, "Verdict: Both answers are the same": None, "Verdict: A = B": None,
        "Verdict: B and A are equally good": None, "Verdict: A or B": None, "Verdict: A/B": None,
        "Verdict: A? Hmm.\nVerdict: a tie.": None, "Verdict: A clearly": None, "Verdict: B is worse than A": None,
        "Verdict: A slight edge to B.": "B", "verdict: a small preference for the answer a": "A",
        "Verdict (A/B): A": "A", "Verdict: A or B? B": "B", "verdict: a/b tests are fun, so B": "B",
        "My verdict is a.": "A", "**Verdict:**\n\n**B**": "B", "Verdict: [[A]]": "A", "Verdict: Answer B": "B",
        "Verdict: A is better than B.": "A", "Verdict: not A but B": "B", "Verdict: B. Both are kind.": "B",
        "Verdict: B (A is too long)": "B", "Verdict: A\nThis verdict is final.": "A", "verdict: b!": "B",
        "Verdict: A<|im_end|>": "A", "Verdict: A outperforms B": None, "Verdict: A clearly surpasses B": None,
        "Verdict: A would beat B": None, "Verdict: A met the needs that B missed": None,
        "Verdict: A fails where B succeeds": None, "Verdict: A ignores the profile. B": None,
        "Verdict: A is not better than B": None, "Verdict: B is worse": None, "Verdict: A doesn't fit": None,
        "Verdict: B is much less helpful": None, "Verdict: A generous vote for B": "B",
        "Verdict: A close call, but B": "B", "Verdict: B - A ignores the profile": "B",
        # what speaks against a letter, takes a verdict back, or labels a line, is none
        "Verdict: I would reject A": None, "Verdict: B should be rejected": None, "Verdict: anything but A": None,
        "Verdict: Don't pick A": None, "Verdict: The worse answer is A": None, "Verdict: A. Wait, no: B.": None,
        "Verdict: A - no, B": None, "Verdict: A: worse": None, "Verdict:\nA: 3/10\nB: 8/10": None,
        "Verdict: A (worse)": None, "Verdict: A\n\nActually, B is better.": None, "Verdict: Not B": None,
        "Verdict: never A": None, "Verdict: least helpful is A": None, "Verdict: B is the loser": None,
        "Verdict: A comes second": None, "Verdict: hardly A": None, "Verdict: not sure, maybe A": None,
        "Verdict: A?": None, "Verdict: prefer B to A": None, "Verdict: B is dominated by A": None,
        "Verdict: A 5, B 7": None, "Verdict: A\nVerdict: not A": None, "Verdict: a draw between the two": None,
        'End with "Verdict: A" or "Verdict: B".': None, "Verdict: B, but A is close": None,
        'I end with "Verdict: A" or "Verdict: B".\nVerdict: A': "A", "Verdict: the winner is B": "B",
        "Verdict: I prefer B": "B", "My verdict is that B is better": "B", "Verdict: \\boxed{B}": "B",
        "Verdict: B over A": "B", "Verdict: instead of A, B": "B", "Verdict: B (not A)": "B",
        "Verdict: B, because A is wrong": "B", "Verdict: slightly B": "B", "Verdict (A or B): B": "B",
        # what follows names the other one, or there is none
        "Verdict: A (B is better)": None, "Verdict: A\n\nB": None, "Verdict: A\nFinal answer: B": None,
        "Verdict: A\nThe better one is B.": None, "Verdict: A (0.3) vs B (0.7)": None, "No verdict. A": None,
        "Verdict: A\nEdit: B": None, "Verdict: A, because B is better only in length": "A",
        "Verdict: A. Although B is better, it is long.": "A", "Verdict: 'B'": "B", "The form is 'Verdict: A'.": None,
        "Verdict: B\nFinal note: a kind answer.": "B", "Verdict: B\n\nReasons: A is better structured, but long.": "B",
        "Verdict: I'd go with A over B": "A", "<|START_RESPONSE|>B<|END_RESPONSE|>": "B",
        "<answer>B</answer>": "B", "```\nB\n```": "B", "<verdict>A</verdict>": "A",
    },
    without_thoughts: {
        **{f"{opened} A{closed}B": "B" for opened, closed in THOUGHTS.items()},
        **{f"{opened} A": None for opened in THOUGHTS},
        **{f"A{closed} B": " B" for closed in THOUGHTS.values()},  # the prompt opened it
        "<think>1</think>2<think>3</think>4": "4", "<think>1</think>2<think>3": None, "a < b": "a < b",
        "analysis A": "analysis A", "B<|return|>\n": "B",
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
        "": None, "nan": None, "Score: 75%": None, "Score: 3,5": 3.5, "3,5": 3.5, "**Rating:** 6,25/9": 6.25,
        "7,5 out of 9": 7.5, "Score: 3, then more": 3, "Score: 1,000": None, "1,2,3": None, "[THINK]3[/THINK]5": 5,
        "Score (1-9): 7": 7, "Score on a scale of 1-9: 4": 4, "7 (on a scale from 1 to 9)": 7, "Score: 7-8": None,
        "Score: 7 or 8": None, "1-9": None,
        # another scale, several numbers, a number that is taken back, or one that rates nothing
        "Score: 7 out of 10": None, "Score: 7 of 10": None, "Score: 7%": None, "Score: 1 000": None,
        "Score: 7, 8": None,
        "Score: 7−8": None, "Score: 7+": None, "Score: 7/9/10": None, "Score: 7, or maybe 3": None,
        "Score: not 7": None, "Score: 7. Actually 4": None, "Score: 7\nCorrected: 4": None, "error 5": None,
        "5 reasons why this fails": None, "I can't rate. 1.": None, "It has 3 problems.": None, "1. It is kind": None,
        "Score (1 = bad, 9 = good): 8": 8, "Score [1-9]: 7": 7, "Score out of 9: 7": 7, "3 of 9": 3, "1 to 9: 8": 8,
        "On a scale from 1 to 9, 8": 8, "Score: \\boxed{7}": 7, "Score: 7 (down from 8)": 7, "7 (good)": 7,
        "It deserves a 7.": 7, "7 points": 7, "7 - good": 7, "**7**": 7, "(7)": 7,
    },
    read_judgement: {
        "Final Judgement: **No**": "No", "Final Judgment:\nYes.": "Yes", "Final Judgement is Yes": "Yes",
        "Final Judgement (Yes/No): No": "No", "Final Judgement: Yes or No: No": "No", "Final Judgement: Yes/No": None,
        'Final Judgement: "Yes" or "No"': None, "Final Judgement: No, wait, Yes": None,
        "Final Judgement: Not sure": None,
        "Final Judgement: Yes\nFinal Judgement: No": "No", "Yes": None,
    },
    read_brackets: {
        "[[A]]": "A", "[[b]] [[B]]": "B", "[[A]] or [[B]]": None, "[[A]] [[C]]": None, "not [[A]]": None,
        "[[Tie]]": None,
        "<answer>[[A]]</answer> <answer>[[B]]</answer>": "B", "<answer>A</answer>": None,
    },
    read_scores: {
        '{"score_1": "4", "score_2": "3"}': "A", '{"score_1": 3, "score_2": 4, "score_3": 5}': None,
        '{"score_1": 5, "score_2": 4, "score_1": 1}': None,
        '{"score_1": 4}': None, '{"score_1": 4, "score_2": 9}': None,
    },
}  # fmt: skip


@pytest.mark.parametrize("read", READ)
def test_what_is_read_of_a_reply(read):
    assert {reply: read(reply) for reply in READ[read]} == pytest.approx(READ[read])


def test_the_shared_verdicts():
    cases = Path(__file__).resolve().parents[4] / "shared" / "data" / "cases" / "verdicts.jsonl"
    if not cases.is_file():
        pytest.skip(f"no replies at {cases}")
    rows = read_lines(cases)
    assert {row["reply"]: read_verdict(row["reply"]) for row in rows} == {
        row["reply"]: row["verdict"] for row in rows
    }
