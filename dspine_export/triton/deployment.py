"""docker-compose.yaml and k8s/: NVIDIA's container with the repository mounted, and probes that see a dead backend process.

Triton can go on calling a streaming model ready after its backend process has died, so liveness asks for a token (``probe.py``), while
readiness is the server's own word.
"""

from __future__ import annotations

from typing import Any

import yaml

from dspine_export.triton.options import RepositoryOptions

IMAGE = "nvcr.io/nvidia/tritonserver:25.06-py3"
MOUNT = "/repository"
HTTP_PORT, GRPC_PORT, METRICS_PORT = 8000, 8001, 8002
LOAD_S = 600  # a large target is read from a cold disk
_PROBE_S, _GRACE_S = 30, 60
_PORTS = {"http": HTTP_PORT, "grpc": GRPC_PORT, "metrics": METRICS_PORT}
DOCKERFILE = f"""# The server's image with what the backend `dspine` needs. Choose the tag by the driver and the torch build by the GPU.
FROM {IMAGE}
RUN pip install --no-cache-dir torch && pip install --no-cache-dir 'numpy<2' dspine-export
"""


def compose_file(options: RepositoryOptions) -> str:
    """docker-compose.yaml."""
    service: dict[str, Any] = {
        "build": "docker",
        "command": [f"{MOUNT}/launch.sh"],
        "volumes": [f".:{MOUNT}:ro"],
        "ports": [f"{port}:{port}" for port in _PORTS.values()],
        "environment": {"DSPINE_MODELS": " ".join(options.served_names)},
        "shm_size": "1gb",
        "init": True,
        "stop_grace_period": f"{_GRACE_S}s",
        "restart": "unless-stopped",
        "healthcheck": {
            "test": ["CMD", "python3", f"{MOUNT}/probe.py", "--reload"],
            "interval": "30s",
            "timeout": f"{_PROBE_S + 5}s",
            "retries": 3,
            "start_period": f"{LOAD_S}s",
        },
    }
    if options.device != "cpu":
        device = {"driver": "nvidia", "count": "all", "capabilities": ["gpu"]}
        service["deploy"] = {"resources": {"reservations": {"devices": [device]}}}
    note = "Not run by dspine-export's tests, which have no containers: check image tag, sizes and paths.\n"
    return _commented(note) + _dump({"services": {"tritonserver": service}})


def values_file(options: RepositoryOptions) -> str:
    """k8s/values.yaml: what differs between clusters, and the probes, for a chart of your own."""
    return _commented("Values for a Helm chart; deployment.yaml beside it is the same without one.\n") + _dump(
        {
            "image": {"repository": IMAGE.split(":")[0], "tag": IMAGE.split(":")[1], "pullPolicy": "IfNotPresent"},
            "replicaCount": 1,
            "models": list(options.served_names),
            "repository": {"mountPath": MOUNT, "existingClaim": "dspine-repository", "readOnly": True},
            "service": {"type": "ClusterIP", "ports": dict(_PORTS)},
            "podAnnotations": _scrape(),
            "resources": _resources(options),
            "sharedMemory": "1Gi",
            "terminationGracePeriodSeconds": _GRACE_S,
            **_probes(options),
        }
    )


def deployment_file(options: RepositoryOptions) -> str:
    """k8s/deployment.yaml: a Deployment and its Service, for kubectl."""
    labels = {"app.kubernetes.io/name": "dspine"}
    container = {
        "name": "tritonserver",
        "image": IMAGE,
        "command": [f"{MOUNT}/launch.sh"],
        "env": [{"name": "DSPINE_MODELS", "value": " ".join(options.served_names)}],
        "ports": [{"name": name, "containerPort": port} for name, port in _PORTS.items()],
        "resources": _resources(options),
        "volumeMounts": [
            {"name": "repository", "mountPath": MOUNT, "readOnly": True},
            {"name": "shm", "mountPath": "/dev/shm"},
        ],
        **_probes(options),
    }
    pod = {
        "metadata": {"labels": labels, "annotations": _scrape()},
        "spec": {
            "terminationGracePeriodSeconds": _GRACE_S,
            "containers": [container],
            "volumes": [
                {"name": "repository", "persistentVolumeClaim": {"claimName": "dspine-repository"}},
                {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": "1Gi"}},
            ],
        },
    }
    deployment = {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": {"name": "dspine", "labels": labels},
        "spec": {"replicas": 1, "selector": {"matchLabels": labels}, "template": pod},
    }
    service = {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": "dspine", "labels": labels},
        "spec": {
            "selector": labels,
            "ports": [{"name": name, "port": port, "targetPort": name} for name, port in _PORTS.items()],
        },
    }
    note = "The image must have dspine_export installed: docker/Dockerfile makes such a one.\n"
    return _commented(note) + "---\n".join(_dump(document) for document in (deployment, service))


def _probes(options: RepositoryOptions) -> dict[str, Any]:
    model = options.served_names[0]
    command = ["python3", f"{MOUNT}/probe.py", "--model", model, "--timeout", str(_PROBE_S)]
    ready = {"path": f"/v2/models/{model}/ready", "port": "http"}
    return {
        "startupProbe": {"httpGet": ready, "periodSeconds": 10, "failureThreshold": LOAD_S // 10},
        "readinessProbe": {"httpGet": ready, "periodSeconds": 5, "failureThreshold": 2},
        "livenessProbe": {
            "exec": {"command": command},
            "periodSeconds": 30,
            "timeoutSeconds": _PROBE_S + 5,
            "failureThreshold": 3,
        },
    }


def _resources(options: RepositoryOptions) -> dict[str, Any]:
    requests = {"cpu": "2", "memory": "8Gi"}
    return (
        {"requests": requests} if options.device == "cpu" else {"requests": requests, "limits": {"nvidia.com/gpu": 1}}
    )


def _scrape() -> dict[str, str]:
    return {"prometheus.io/scrape": "true", "prometheus.io/port": str(METRICS_PORT), "prometheus.io/path": "/metrics"}


def _commented(text: str) -> str:
    return "".join(f"# {line}\n" for line in text.splitlines())


def _dump(document: dict[str, Any]) -> str:
    return yaml.dump(document, Dumper=_Plain, sort_keys=False, width=120)


class _Plain(yaml.SafeDumper):
    """Without anchors: the files are for people to edit."""

    def ignore_aliases(self, data: Any) -> bool:
        return True
