// See NvInferRuntime.h beside this file.
#pragma once

#define NV_TENSORRT_MAJOR 11
#define NV_TENSORRT_MINOR 0
