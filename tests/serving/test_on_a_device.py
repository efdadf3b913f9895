"""A server whose models are on a device: in its threads too, nothing lies elsewhere."""

from serving_helpers import in_thread

from device_walk import walked

TEXT = "def f(x):\n    return x\n" * 4


def test_serving(trained_run, recurrent_run, speaking_run, tmp_path):
    def path(device):
        folder, found = tmp_path / device, []
        folder.mkdir()
        # Where there is a card, it is taken.
        with in_thread(trained_run, recurrent_run, speaking_run, sessions=folder) as server:

            def asked(address, **body):
                answer = server.post(address, **body)
                assert answer.is_success, answer.text
                return answer.json()

            for name in server.models:
                prompt = "import" if name == "speaking" else "def "
                written = {"model": name, "prompt": prompt, "max_tokens": 6, "seed": 1, "n": 2}
                found.append([one["text"] for one in asked("/v1/completions", **written)["choices"]])
                told = asked("/v1/completions", **written, echo=True, logprobs=2)["choices"][0]["logprobs"]
                found.append([value or 0.0 for value in told["token_logprobs"]])
                found.append(asked("/v1/score", model=name, text=TEXT)["bits"])
                session = asked("/v1/sessions", model=name)["id"]
                asked(f"/v1/sessions/{session}/feed", text=prompt, logprobs=True)
                found.append(asked(f"/v1/sessions/{session}/generate", max_tokens=5, seed=2)["choices"][0]["text"])
                asked(f"/v1/sessions/{session}/save", name=name)
                again = asked("/v1/sessions/restore", name=name)["id"]
                found.append(asked(f"/v1/sessions/{again}/generate", max_tokens=5, seed=3)["choices"][0]["text"])
            found.append(asked("/v1/attention", model="small", text=TEXT, position=9, layer=1, head=0)["weights"])
        return found

    walked(path, close=1e-3)
