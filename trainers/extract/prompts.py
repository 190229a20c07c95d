"""Lines of a prompts file become token ids; see extract_hf.py --help for the forms of a line."""
import hashlib
import json
from dataclasses import dataclass

from samples import ExtractError, read_jsonl

PROMPT_KEYS = ("prompt", "messages", "token_ids")
KNOWN_KEYS = {*PROMPT_KEYS, "continuation", "loss_mask", "prompt_len", "max_new_tokens"}


@dataclass
class Document:
    index: int                     # names the sample file: the number of the line, from 0
    where: str                     # file and line, for messages
    ids: list                      # the prompt to continue, or with `mask` the whole text
    mask: list | None = None       # one 0 or 1 a token of a given text; None: the verifier continues `ids`
    max_new_tokens: int | None = None


def seed_of(seed, document):
    """A seed of the document's own: any order and any resumption samples the same text."""
    digest = hashlib.sha256(json.dumps([seed, document.index, document.ids]).encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1


class Reader:
    """Turns lines into documents. `given`: the file has the continuations, the verifier writes none."""

    def __init__(self, path, tokenizer, vocab_size, given=False, regenerate=False, template_options=None):
        self.path, self.tokenizer, self.vocab_size = path, tokenizer, vocab_size
        self.given, self.regenerate, self.template_options = given, regenerate, template_options or {}

    def lines(self):
        """(index, line number, object) of every line; indices stay those of the lines when some are empty."""
        for number, line in read_jsonl(self.path):
            yield number - 1, number, line

    def document(self, index, number, line):
        where = f"{self.path}:{number}"
        unknown = set(line) - KNOWN_KEYS
        has = [key for key in PROMPT_KEYS if key in line]
        if len(has) != 1:
            raise ExtractError(f"{where}: needs exactly one of {', '.join(PROMPT_KEYS)}; has {has or 'none'}"
                               + (f" (unknown keys: {', '.join(sorted(unknown))})" if unknown else ""))
        document = (self._given if self.given else self._prompt)(index, where, line, has[0])
        if not document.ids:
            raise ExtractError(f"{where}: no token")
        if document.mask is not None and len(document.mask) != len(document.ids):
            raise ExtractError(f"{where}: loss_mask has {len(document.mask)} entries, the text {len(document.ids)} tokens")
        return document

    def _prompt(self, index, where, line, key):
        for name in ("continuation", "loss_mask", "prompt_len"):
            if name in line:
                raise ExtractError(f"{where}: has {name}; add --given to use given text, or remove the key to let the "
                                   "verifier write it")
        max_new = line.get("max_new_tokens")
        if max_new is not None and (type(max_new) is not int or max_new < 1):
            raise ExtractError(f"{where}: max_new_tokens is {max_new!r}; expected a number above 0")
        if key == "messages":
            messages = self._messages(line, where)
            if messages[-1]["role"] in ("assistant", "model"):
                if not self.regenerate:
                    raise ExtractError(f"{where}: messages end with the assistant's; add --regenerate to have the verifier "
                                       "write that turn anew, or --given to keep it")
                messages = messages[:-1]
            ids = self._template(messages, where, True)
        else:
            ids = self._text(line[key], where, True) if key == "prompt" else self._ids(line[key], where, key)
        return Document(index, where, ids, max_new_tokens=max_new)

    def _given(self, index, where, line, key):
        marks = [name for name in ("continuation", "loss_mask", "prompt_len") if name in line]
        if key == "messages" and not marks:
            messages = self._messages(line, where)
            if messages[-1]["role"] not in ("assistant", "model"):
                raise ExtractError(f"{where}: messages end without the assistant's turn; there is nothing to train on")
            prompt = self._template(messages[:-1], where, True)
            whole = self._template(messages, where, False)
            if whole[: len(prompt)] != prompt:
                raise ExtractError(f"{where}: the chat template writes the conversation differently with and without the "
                                   "last turn, so its beginning is not known; give token_ids and loss_mask")
            return Document(index, where, whole, [0] * len(prompt) + [1] * (len(whole) - len(prompt)))
        if len(marks) != 1:
            raise ExtractError(f"{where}: with --given a line needs exactly one of continuation, loss_mask, prompt_len; "
                               f"has {marks or 'none'}")
        if marks[0] == "continuation":
            prompt = self._template(self._messages(line, where), where, True) if key == "messages" else \
                self._text(line[key], where, True) if key == "prompt" else self._ids(line[key], where, key)
            more = line["continuation"]
            more = self._text(more, where, False) if isinstance(more, str) else self._ids(more, where, "continuation")
            if not more:
                raise ExtractError(f"{where}: continuation is empty")
            return Document(index, where, prompt + more, [0] * len(prompt) + [1] * len(more))
        if key != "token_ids":
            raise ExtractError(f"{where}: {marks[0]} counts tokens and goes with token_ids, not with {key}")
        ids = self._ids(line[key], where, key)
        if marks[0] == "prompt_len":
            length = line["prompt_len"]
            if type(length) is not int or not 0 <= length <= len(ids):
                raise ExtractError(f"{where}: prompt_len is {length!r}; expected 0 to {len(ids)}")
            return Document(index, where, ids, [0] * length + [1] * (len(ids) - length))
        mask = line["loss_mask"]
        if not isinstance(mask, list) or any(value not in (0, 1) for value in mask):
            raise ExtractError(f"{where}: loss_mask must be a list of 0 and 1")
        return Document(index, where, ids, [int(value) for value in mask])

    def _messages(self, line, where):
        messages = line["messages"]
        if not isinstance(messages, list) or not messages or any(
                not isinstance(message, dict) or not isinstance(message.get("content"), str)
                or not isinstance(message.get("role"), str) for message in messages):
            raise ExtractError(f"{where}: messages must be a list of {{\"role\": …, \"content\": text}}; only text is "
                               "extracted")
        return messages

    def _template(self, messages, where, prompt):
        if self.tokenizer is None:
            raise ExtractError(f"{where}: messages need a tokenizer; the verifier's directory has none")
        if not self.tokenizer.chat_template:
            raise ExtractError(f"{where}: the verifier has no chat template; give one with --chat-template FILE")
        try:
            text = self.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=prompt,
                                                      **self.template_options)
        except Exception as error:  # jinja2's own classes; a template may raise what it likes
            raise ExtractError(f"{where}: the chat template fails: {error}") from None
        return self._text(text, where, True)

    def _text(self, text, where, begin):
        """Ids of a text. At the beginning of a document there is exactly one <bos>, whoever writes it."""
        if not isinstance(text, str):
            raise ExtractError(f"{where}: expected text, got {type(text).__name__}")
        if self.tokenizer is None:
            raise ExtractError(f"{where}: text needs a tokenizer; the verifier's directory has none (token_ids do not)")
        ids, bos = list(self.tokenizer(text, add_special_tokens=False)["input_ids"]), self.tokenizer.bos_token_id
        return [bos] + ids if begin and bos is not None and ids[:1] != [bos] else ids

    def _ids(self, ids, where, key):
        if not isinstance(ids, list) or any(type(token) is not int for token in ids):
            raise ExtractError(f"{where}: {key} must be a list of token ids")
        for place, token in enumerate(ids):
            if not 0 <= token < self.vocab_size:
                raise ExtractError(f"{where}: {key}[{place}] is {token}; the vocabulary has 0 to {self.vocab_size - 1}")
        return list(ids)
