from __future__ import annotations

from data.text.digits import words
from examples.digits import conversations, speech


def test_the_tokenizer_has_the_words_of_all_questions_in_order() -> None:
    groups = [group for name, group in vars(conversations).items() if name.startswith("_ASK_")]
    questions = [question for group in (*groups, speech._QUESTIONS) for question in group]
    used = {word for text in questions for word in text.split() if not word.startswith("{")}
    assert len(groups) == 6
    assert used | {"then", "system", "user", "assistant"} <= set(words())
    assert words() == sorted(words())
