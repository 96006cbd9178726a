"""Which attention backends get sparse decode, and which layers keep dense attention and why."""

from types import SimpleNamespace
from typing import Any

import pytest
from locks_sglang import backend
from locks_sglang.backend import upgrade, why_dense
from locks_sglang.config import LocksError
from plugin_process import AtLoad


def layer(at_load: AtLoad, **changes: Any) -> Any:
    from sglang.srt.layers.radix_attention import RadixAttention

    later = {name: changes.pop(name) for name in ("xai_temperature_len",) if name in changes}
    arguments = {"num_heads": 4, "head_dim": 64, "scaling": 0.125, "num_kv_heads": 2, "layer_id": 3}
    made = RadixAttention(**(arguments | changes))
    for name, value in later.items():
        setattr(made, name, value)
    return made


def test_ordinary_layer_is_sparse(at_load: AtLoad) -> None:
    assert why_dense(layer(at_load)) is None


@pytest.mark.parametrize(
    ("feature", "reason"),
    [
        ({"is_cross_attention": True}, "cross attention"),
        ({"sliding_window_size": 4096}, "sliding window of 4096 tokens"),
        ({"use_irope": True}, "chunked attention (irope)"),
        ({"logit_cap": 30.0}, "logit cap 30.0"),
        ({"v_head_dim": 32}, "values of 32 dimensions, keys of 64"),
        ({"attn_type": "ENCODER_ONLY"}, "attention type"),
        ({"attn_type": "DECODER_BIDIRECTIONAL"}, "attention type"),
        ({"xai_temperature_len": 1024}, "temperature by position"),
    ],
    ids=str,
)
def test_layers_that_stay_dense(at_load: AtLoad, feature: dict[str, Any], reason: str) -> None:
    from sglang.srt.layers.radix_attention import AttentionType

    if "attn_type" in feature:
        feature = {"attn_type": AttentionType[feature["attn_type"]]}
    found = why_dense(layer(at_load, **feature))
    assert found is not None and found.startswith(reason)


class SomeOtherBackend:
    pass


def test_unknown_backend_is_refused() -> None:
    made = SomeOtherBackend()
    with pytest.raises(LocksError) as error:
        upgrade(made, None)  # type: ignore[arg-type]
    assert "SomeOtherBackend" in str(error.value)
    assert "legal: --attention-backend fa3, flashinfer, torch_native (" in str(error.value)
    assert type(made) is SomeOtherBackend


@pytest.mark.parametrize("version", [3, 4])
def test_fa4_has_the_class_of_fa3(version: int) -> None:
    made = type("FlashAttentionBackend", (), {"fa_impl_ver": version})()
    if version == 3:
        backend.adapt(made)
        return
    with pytest.raises(LocksError, match="FlashAttentionBackend of fa4; legal: --attention-backend fa3"):
        backend.adapt(made)


def test_subclass_of_a_supported_backend_is_refused(at_load: AtLoad) -> None:
    """It may compute something else than the class it comes from."""
    from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend

    made = type("TunedTorchNative", (TorchNativeAttnBackend,), {}).__new__(TorchNativeAttnBackend)
    made.__class__ = type("TunedTorchNative", (TorchNativeAttnBackend,), {})
    with pytest.raises(LocksError, match="TunedTorchNative"):
        upgrade(made, None)  # type: ignore[arg-type]


def test_upgrade_keeps_the_object_and_its_class(at_load: AtLoad) -> None:
    from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend

    made = TorchNativeAttnBackend.__new__(TorchNativeAttnBackend)
    made.marker = object()
    marker, state = made.marker, SimpleNamespace(tier=None)
    upgrade(made, state)  # type: ignore[arg-type]
    assert isinstance(made, TorchNativeAttnBackend)
    assert type(made).__name__ == "LocksTorchNativeAttnBackend"
    assert made.marker is marker and made.locks is state
    assert type(made).forward_extend is TorchNativeAttnBackend.forward_extend


def test_prefill_changes_with_a_host_tier_alone(at_load: AtLoad) -> None:
    from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend

    made = TorchNativeAttnBackend.__new__(TorchNativeAttnBackend)
    upgrade(made, SimpleNamespace(tier=object()))  # type: ignore[arg-type]
    assert type(made).__name__ == "LocksTorchNativeAttnBackend"
    assert type(made).forward_extend is not TorchNativeAttnBackend.forward_extend


def test_terms_that_are_not_computed_are_refused(at_load: AtLoad) -> None:
    plain = layer(at_load)
    backend._refuse_extra_terms(plain, {"sinks": None})
    with pytest.raises(LocksError, match=r"layer 3 passes rel_bias, sinks .*without --sparse-decode"):
        backend._refuse_extra_terms(plain, {"sinks": 1, "rel_bias": 2, "q_rope": None})
