/* Record that a built plugin library exports about itself; plain C, readable through dlsym without TensorRT. */
#ifndef DSPINE_ABI_H
#define DSPINE_ABI_H

#include <stdint.h>

/* Major: operands, attributes or serialised fields changed, so that plans of another major cannot be loaded. Minor:
 * additions. */
#define DSPINE_ABI_MAJOR 1
#define DSPINE_ABI_MINOR 0

typedef struct DspinePluginsAbi
{
    uint32_t struct_bytes;
    int32_t abi_major;
    int32_t abi_minor;
    int32_t tensorrt_header_major;
    int32_t tensorrt_header_minor;
    char const* version;       /* of the product, e.g. "0.1.0" */
    char const* architectures; /* compute capabilities with machine code, comma separated, e.g. "80,90" */
    char const* source_hash;   /* of the sources it was built from; empty when built by hand */
} DspinePluginsAbi;

/* Exported as `DspinePluginsAbi const* dspine_plugins_abi(void)`; the record lives as long as the library. */

#endif
