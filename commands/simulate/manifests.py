"""The chosen plan as a kustomization for `deploy/kubernetes`."""

from collections.abc import Mapping

_TEXT = """\
# {title}
# simulated: true. Written by `snapserve simulate plan`.
# Save it as deploy/kubernetes/planned/kustomization.yaml; set the models in base/kustomization.yaml. Then:
# `kubectl apply -k deploy/kubernetes/planned`. With GPUs, name ../gpu instead of ../base.
apiVersion: kustomize.config.k8s.io/v1beta1
kind: Kustomization
resources:
  - ../base
replicas:
  - name: snapserve
    count: {replicas}
configMapGenerator:
  - name: snapserve
    behavior: merge
    literals:
{literals}
"""


def kustomization(title: str, replicas: int, settings: Mapping[str, str]) -> str:
    """Return a kustomization on top of `base`, with these options of `serve` by their flags' names."""
    literals = (
        f"      - SNAPSERVE_{flag.replace('-', '_').upper()}={value}" for flag, value in settings.items()
    )
    return _TEXT.format(title=title, replicas=replicas, literals="\n".join(literals))
