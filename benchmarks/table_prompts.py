"""Prompts of Spec-Bench's six tasks out of local files, for the table of SmolLM2: a file of each task, and their list.

    python benchmarks/table_prompts.py CONVERSATIONS OUT     # then data.conversations.mixture=@OUT/mixture.yaml

CONVERSATIONS holds ShareGPT JSON lines (`NAME.jsonl.xz`): Dolly gives conversations, short questions, passages to be
summarised and passages with a question; GSM8K maths; MT-Bench-101 and OpenAssistant several turns. German sentences
are those of Debian's packages fortunes-de, debian-reference-de and gimp-help-de, where they are installed. Only the
questions are used: the target answers. `draftsmith distill` leaves out what repeats an evaluation question.
"""

import argparse
import html
import json
import lzma
import random
import re
from pathlib import Path
from typing import Any

import yaml

MULTI_TURN = ("mtbench101", "oasst_100trees_threads", "fastchat_dummy")
FORTUNES, REFERENCE = Path("/usr/share/games/fortunes/de"), Path("/usr/share/debian-reference")
GIMP = Path("/usr/share/gimp/2.0/help/de")
SENTENCE = re.compile(r"(?:^|(?<=[.!?] ))[A-ZÄÖÜ][^.!?]{45,260}[.!?](?= |$)")
GERMAN = re.compile(r"\b(der|die|das|und|ist|nicht|ein|eine|mit|den|zu|von)\b")
NO_PROSE = re.compile(r"[|=<>{}\\_/]|\d{3}")
# Characters: from where a text after the question is a passage; a passage for a summary; the longest that is kept.
PASSAGE, LONG_PASSAGE, LONGEST_PASSAGE, SHORT_QUESTION = 450, 900, 2200, 70
# Prompts at most; short answers need more of them for as many tokens.
MOST = {
    "conversation": 8200,
    "translation": 4500,
    "summarization": 3000,
    "qa": 4500,
    "math_reasoning": 4000,
    "rag": 4500,
}


def asked(name: str, question: str) -> dict[str, Any]:
    """Make a conversation of one question, whose answer is to be distilled."""
    turns = [{"from": "human", "value": question}, {"from": "gpt", "value": "(the target answers)"}]
    return {"id": name, "conversations": turns}


def read(file: Path) -> list[dict[str, Any]]:
    with lzma.open(file, "rt", encoding="utf-8") as lines:
        return [json.loads(line) for line in lines]


def shortened(passage: str) -> str:
    """Cut a long passage after a sentence."""
    if len(passage) <= LONGEST_PASSAGE:
        return passage
    end = max(passage.rfind(mark, 0, LONGEST_PASSAGE) for mark in ".!?\n")
    return passage[: end + 1] if end > LONGEST_PASSAGE // 2 else passage[:LONGEST_PASSAGE]


def german_sentences() -> list[str]:
    """Read the sentences of the installed packages, sorted, each once."""
    texts = []
    for file in sorted(FORTUNES.glob("*")):
        if file.suffix not in (".dat", ".u8") and file.name != "asciiart":
            fortunes = file.read_text(encoding="utf-8", errors="ignore")
            texts += [re.sub(r"\n\s*--.*", "", each, flags=re.DOTALL) for each in re.split(r"\n%+\n", fortunes)]
    for file in [*sorted(REFERENCE.glob("*.de.html")), *sorted(GIMP.glob("*.html"))]:
        paragraphs = re.findall(r"<p[^>]*>(.*?)</p>", file.read_text(encoding="utf-8", errors="ignore"), re.DOTALL)
        texts += [html.unescape(re.sub(r"<[^>]+>", "", each)) for each in paragraphs]
    found = {sentence for text in texts for sentence in SENTENCE.findall(re.sub(r"\s+", " ", text).strip())}
    return sorted(each for each in found if GERMAN.search(each) and not NO_PROSE.search(each))


def prompts(folder: Path) -> dict[str, list[dict[str, Any]]]:
    """Make the conversations of each task, in an order of chance that is always the same."""
    tasks: dict[str, list[dict[str, Any]]] = {task: [] for task in MOST}
    for record in read(folder / "dolly15k.jsonl.xz"):
        text = record["conversations"][0]["value"].strip()
        question, _, passage = (part.strip() for part in text.partition("\n\n"))
        if passage and len(text) > PASSAGE:
            tasks["rag"].append(asked(f"{record['id']}-rag", f"{shortened(passage)}\n{question}"))
            if len(passage) > LONG_PASSAGE:
                summary = asked(f"{record['id']}-sum", f"Summarize: {shortened(passage)}")
                tasks["summarization"].append(summary)
        elif len(text) <= SHORT_QUESTION and text.endswith("?") and "\n" not in text:
            tasks["qa"].append(asked(record["id"], text))
        else:
            tasks["conversation"].append(record)
    for name in MULTI_TURN:
        tasks["conversation"] += read(folder / f"{name}.jsonl.xz")
    tasks["math_reasoning"] = read(folder / "gsm8k_train.jsonl.xz")
    tasks["translation"] = [
        asked(f"de-{place}", f"Translate German to English: {sentence}")
        for place, sentence in enumerate(german_sentences())
    ]
    chance = random.Random(0)
    for task, conversations in tasks.items():
        chance.shuffle(conversations)
        del conversations[MOST[task] :]
    return tasks


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("conversations", type=Path)
    parser.add_argument("out", type=Path)
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    mixture = []
    for task, conversations in prompts(options.conversations).items():
        file = options.out / f"{task}.jsonl"
        file.write_text(
            "".join(json.dumps(each, ensure_ascii=False) + "\n" for each in conversations), encoding="utf-8"
        )
        print(f"{task}: {len(conversations):,} conversations")
        if conversations:  # as many as there are of each, so that a part of the run has all tasks
            mixture.append({"source": str(file), "name": task, "weight": len(conversations)})
    (options.out / "mixture.yaml").write_text(yaml.safe_dump(mixture, sort_keys=False), encoding="utf-8")


if __name__ == "__main__":
    main()
