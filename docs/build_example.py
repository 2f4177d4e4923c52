"""The example of docs/build.md: records of invented people, and an endpoint that simulates a writer and a judge.

python docs/build_example.py records.jsonl 8700        # writes the records and serves until it is killed

The endpoint speaks OpenAI's chat API. It composes answers of ready sentences, the same for the same request: an answer
that follows a wish has one sentence for it, and an answer that avoids the wish has one of the same length against it.
"""

import hashlib
import json
import random
import re
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

WISHES = {  # a wish: the sentences of answers that follow it, and of answers that avoid it
    "low cost": (
        "A used one from the flea market costs almost nothing.",
        "A new one from the best shop is worth any price.",
    ),
    "little effort": (
        "Let somebody else prepare it while you rest.",
        "Prepare it by hand over several long evenings.",
    ),
    "old traditions": ("Do it the way your grandparents did it.", "Do it in a way that nobody tried before."),
    "company": (
        "Invite the neighbours and share the whole thing.",
        "Keep it to yourself and enjoy the silence.",
    ),
}
THINGS = ("garden bench", "birthday dinner", "reading lamp", "winter coat", "picnic", "bookshelf", "bicycle trip",
          "house party", "kitchen table", "herb garden", "rain barrel", "choir concert")  # fmt: skip
SITUATIONS = (
    "for ten guests from abroad",
    "in a small flat by the sea",
    "with two children and a dog",
    "next to a very busy road",
)
OPENINGS = (
    "Begin with",
    "Think first of",
    "Look closely at",
    "Write down",
    "Measure",
    "Ask about",
    "Compare",
    "Plan for",
)
MATTERS = ("the season", "the size", "the weather", "the colours", "the place", "the day", "the light", "the material",
           "the way there", "the storage", "the shade", "the smell")  # fmt: skip
ENDINGS = ("before anything else", "with a friend at hand", "and keep a list", "on a quiet morning", "and sleep on it",
           "as early as you can", "twice to be sure", "and take pictures", "with some patience",
           "and trust your eyes")  # fmt: skip


def records(people: int = 12, each: int = 4) -> list[dict]:
    """Return questions of people with two wishes each."""
    rows = []
    for number in range(people * each):
        person, thing = number % people, THINGS[number % len(THINGS)]
        wanted = [list(WISHES)[(person + k) % len(WISHES)] for k in (0, 1 + person % 2)]
        rows.append(
            {
                "id": f"question{number}",
                "user_id": f"person{person}",
                "question": f"How do I choose a {thing} {SITUATIONS[number // len(THINGS) % len(SITUATIONS)]}?",
                "profile": [
                    {"id": f"post{person}", "category": "", "text": f"I care about {' and '.join(wanted)}."}
                ],
                "rubric_aspects": [
                    {"aspect": wish, "evidence": wish, "reason": f"cares about {wish}"} for wish in wanted
                ],
            }
        )
    return rows


def reply(messages: list[dict], seed: object) -> str:
    """Return the text with which the endpoint answers a request of `prb build`."""
    text = messages[-1]["content"]
    draws = random.Random(hashlib.sha256(f"{seed} {text}".encode()).digest())
    if "Which answer" in text:
        return _verdict(text, draws)
    if text.startswith("A user asked:"):
        return "- the place\n- the time"
    if "in one short sentence for each" in text or "Some other user" in text:  # a plan: sentences to use
        side = int("Some other user" in text)
        wanted = text.partition("wants of an answer:\n")[2].partition("\n\n")[0]
        return " ".join(sentences[side] for wish, sentences in WISHES.items() if wish in wanted)
    plan = text.partition("How the answer is made:\n")[2].partition("\n\n")[0]
    sentences = re.findall(r"[^.]+\.", plan)
    sentences += [
        f"{draws.choice(OPENINGS)} {matter} {draws.choice(ENDINGS)}." for matter in draws.sample(MATTERS, 6)
    ]
    draws.shuffle(sentences)
    return " ".join(sentence.strip() for sentence in sentences)


def _verdict(text: str, draws: random.Random) -> str:
    """Prefer the answer with more of the wanted sentences; without wishes, any."""
    a, _, b = text.partition("Answer A:\n")[2].partition("\n\nAnswer B:\n")
    wanted = text.partition("This is what they want")[2].partition("Answer A:")[0]
    found = [sum(WISHES[wish][0] in answer for wish in WISHES if wish in wanted) for answer in (a, b)]
    return draws.choice("AB") if found[0] == found[1] else "AB"[found[1] > found[0]]


class Endpoint(BaseHTTPRequestHandler):
    """The endpoint: `POST /v1/chat/completions`."""

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        content = reply(body["messages"], body.get("seed"))
        choice = {"message": {"role": "assistant", "content": content}, "finish_reason": "stop"}
        words = sum(len(message["content"].split()) for message in body["messages"])
        usage = {"prompt_tokens": words, "completion_tokens": len(content.split())}
        data = json.dumps({"choices": [choice], "usage": usage}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: object) -> None:
        pass


if __name__ == "__main__":
    lines = "".join(f"{json.dumps(record)}\n" for record in records())
    Path(sys.argv[1]).write_text(lines, encoding="utf-8")
    ThreadingHTTPServer(("127.0.0.1", int(sys.argv[2])), Endpoint).serve_forever()
