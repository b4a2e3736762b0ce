"""openpi's own client (openpi-client 0.1.2, with numpy 1) asks a policy of ours. Its Python is one of its own:

make test-peers
"""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hilt.policies.vla.small_vla import SmallVLA, SmallVLAConfig
from hilt.serving import PolicyServer
from hilt.serving.policy_server import ServerAccess

ROOT = Path(__file__).parents[2]
PYTHON = ROOT / ".venv-openpi" / "bin" / "python"
pytestmark = [
    pytest.mark.peers,
    pytest.mark.skipif(not PYTHON.exists(), reason="there is no .venv-openpi: make test-peers makes it"),
]
KEY = "a-key-of-some-length"
CLIENT = """if True:
    import json, sys
    import numpy as np
    from openpi_client import action_chunk_broker, image_tools, websocket_client_policy

    port, key = int(sys.argv[1]), sys.argv[2]
    client = websocket_client_policy.WebsocketClientPolicy("127.0.0.1", port, api_key=key or None)
    draws = np.random.default_rng(0)
    picture = draws.integers(0, 256, (240, 320, 3)).astype(np.uint8)
    image = image_tools.convert_to_uint8(image_tools.resize_with_pad(picture, 224, 224))
    state = draws.normal(size=8)
    seen = {"observation/image": image, "observation/wrist_image": image[::-1], "observation/state": state,
            "prompt": "put the bowl on the plate"}
    answer = client.infer(seen)
    try:
        client.infer({**seen, "observation/state": np.zeros(3)})
        error = ""
    except RuntimeError as raised:
        error = str(raised)
    broker = action_chunk_broker.ActionChunkBroker(client, action_horizon=2)
    single = [broker.infer(seen)["actions"].tolist() for _ in range(3)]
    np.savez(sys.argv[3], image=image, state=state, actions=answer["actions"])
    print(json.dumps({"metadata": client.get_server_metadata(), "error": error, "single": single,
                      "dtype": answer["actions"].dtype.str, "version": answer["version"], "numpy": np.__version__,
                      "timing": answer["server_timing"]}))
"""


def asked(server: PolicyServer, folder: Path, key: str = "") -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    port = server.url.rsplit(":", 1)[1]
    command = [PYTHON, "-c", CLIENT, port, key, folder / "out.npz"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    with np.load(folder / "out.npz") as arrays:
        return json.loads(done.stdout), dict(arrays)


@pytest.mark.parametrize("key", ["", KEY])
def test_openpis_client_gets_what_the_policy_answers(tmp_path: Path, key: str):
    policy = SmallVLA(SmallVLAConfig(cameras=("full_image", "wrist_image"), state_dim=8, chunk=5)).eval()
    file = tmp_path / "arm.key"
    file.write_text(KEY)
    file.chmod(0o600)
    with PolicyServer(policy, 12, access=ServerAccess(port=0, keys=[file] if key else ())) as server:
        said, arrays = asked(server, tmp_path, key)
    assert said["numpy"].startswith("1.") and said["metadata"]["chunk"] == 5 and said["metadata"]["action_dim"] == 7
    assert (said["dtype"], said["version"], said["timing"]["batch"]) == ("<f4", 12, 1)
    ours = {
        "full_image": arrays["image"],
        "wrist_image": arrays["image"][::-1],
        "state": arrays["state"].astype(np.float32),
        "instruction": "put the bowl on the plate",
    }
    expected = policy.act([ours], sample=False)[0][0]
    np.testing.assert_allclose(arrays["actions"], expected, atol=1e-5)
    np.testing.assert_allclose(said["single"], expected[[0, 1, 0]], atol=1e-5)
    assert said["error"] == ("Error in inference server:\n'observation/state' is float64 [3]; expected floating [8].")


def test_openpis_client_without_a_key_is_refused(tmp_path: Path):
    file = tmp_path / "arm.key"
    file.write_text(KEY)
    file.chmod(0o600)
    policy = SmallVLA(SmallVLAConfig(cameras=("full_image", "wrist_image"))).eval()
    with (
        PolicyServer(policy, access=ServerAccess(port=0, keys=[file])) as server,
        pytest.raises(AssertionError, match="401"),
    ):
        asked(server, tmp_path)
