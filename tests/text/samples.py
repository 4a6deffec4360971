"""Texts that tokenizers have been known to change."""

SAMPLES = {
    "empty": "",
    "plain": "The capital of France is Paris.",
    "code": "def f(x):\n\treturn {'a': x[0] ** 2}  # ok\n\n\nclass A: ...\n",
    "accents": "Où est le café? Ærøskøbing, Łódź, naïve",
    "combining": "cafe\u0301 n\u0303",
    "cjk": "東京は日本の首都です。你好，世界！ 안녕하세요",
    "emoji": "😀👍🏽 👩‍👩‍👧‍👦 🏴‍☠️ 🇫🇷",
    "right_to_left": "שלום עולם, مرحبا بالعالم ١٢٣",
    "no_break_space": "10\u00a0000\u202f€",
    "line_ends": "one\r\ntwo\rthree\n\r\n",
    "controls": "a\x00b\x1bc\x7f\u200b\ufeff",
    "spaces": "   three  two one \t\n  ",
    "digits": "3.14159, 1,000,000 and x²³½",
    "replacement": "a\ufffdb\ufffd",
    "special": "<|im_start|>user\nHi<|im_end|>\n<|im_sta<|endoftext|>",
}
