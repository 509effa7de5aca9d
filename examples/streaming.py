"""One prompt, its text printed as it is generated, with the time of each piece.

python examples/streaming.py [MODEL]
"""

import sys
import time

from fusewright import LLM, SamplingParams


def main() -> None:
    llm = LLM(model=sys.argv[1] if len(sys.argv) > 1 else "abacus")
    params = SamplingParams(temperature=0.0, max_tokens=32)

    started = time.perf_counter()
    shown = 0
    # Every step yields the request so far; the text only grows.
    for output in llm.stream("reverse fusewrig=", params):
        text = output.outputs[0].text
        print(f"{1e3 * (time.perf_counter() - started):8.1f} ms  {text[shown:]!r}")
        shown = len(text)
    print(f"{output.prompt}{text}  [{output.outputs[0].finish_reason}]")


if __name__ == "__main__":
    main()
