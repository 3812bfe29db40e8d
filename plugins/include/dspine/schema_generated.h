// Generated from dspine_export/ops_schema.py by `python -m dspine_plugins.schema_header`. Do not edit.
#pragma once

#include <cstdint>

namespace dspine
{

inline constexpr char kNamespace[] = "dspine";
inline constexpr char kVersion[] = "1";
inline constexpr int32_t kMaxRank = 4;

enum class ElementRule : int32_t
{
    kCompute, //!< float32 or bfloat16, the same for all operands of one node
    kFloat32,
    kInt64,
};

enum Symbol : int32_t
{
    kBatch, //!< sequences
    kBlock, //!< slots of a block, the anchor included
    kHidden, //!< hidden size
    kRank, //!< transfer rank
    kMessage, //!< message size
    kCandidates, //!< candidates of a slot
    kVocab, //!< vocabulary rows
    kSymbolCount
};

//! A dimension, scale * symbol + offset.
struct Dim
{
    Symbol symbol;
    int32_t scale;
    int32_t offset;
};

struct Operand
{
    char const* name;
    ElementRule element;
    int32_t rank;
    Dim dims[kMaxRank];
};

struct OpSchema
{
    char const* name;
    int32_t nbInputs;
    Operand const* inputs;
    int32_t nbOutputs;
    Operand const* outputs;
    int32_t nbAttributes; //!< scalar float attributes, all required
    char const* const* attributes;
};

// Writes each slot's gated predecessor message into the slot; slot 0 is copied.
inline constexpr Operand kAdjacentInjectionInputs[] = {
    {"hidden", ElementRule::kCompute, 3, {{kBatch, 1, 0}, {kBlock, 1, 0}, {kHidden, 1, 0}}},
    {"feature", ElementRule::kCompute, 3, {{kBatch, 1, 0}, {kBlock, 1, 0}, {kRank, 1, 0}}},
    {"anchor_message", ElementRule::kCompute, 2, {{kBatch, 1, 0}, {kMessage, 2, 0}}},
    {"message_weight", ElementRule::kCompute, 2, {{kMessage, 1, 0}, {kRank, 1, 0}}},
    {"receiver_gate_weight", ElementRule::kCompute, 2, {{kMessage, 1, 0}, {kRank, 1, 0}}},
    {"predecessor_gate_weight", ElementRule::kCompute, 2, {{kMessage, 1, 0}, {kRank, 1, 0}}},
    {"gate_bias", ElementRule::kCompute, 1, {{kMessage, 1, 0}}},
    {"write_weight", ElementRule::kCompute, 2, {{kHidden, 1, 0}, {kMessage, 1, 0}}},
};
inline constexpr Operand kAdjacentInjectionOutputs[] = {
    {"injected", ElementRule::kCompute, 3, {{kBatch, 1, 0}, {kBlock, 1, 0}, {kHidden, 1, 0}}},
};
inline constexpr OpSchema kAdjacentInjectionSchema{"AdjacentInjection", 8, kAdjacentInjectionInputs, 1, kAdjacentInjectionOutputs, 0, nullptr};

// Scores every (predecessor, successor) pair of adjacent candidates by redoing the last write with the predecessor's code.
inline constexpr Operand kTransitionScoresInputs[] = {
    {"pre_injection", ElementRule::kCompute, 3, {{kBatch, 1, 0}, {kBlock, 1, -1}, {kHidden, 1, 0}}},
    {"receiver_gate", ElementRule::kCompute, 3, {{kBatch, 1, 0}, {kBlock, 1, -1}, {kMessage, 1, 0}}},
    {"anchor_ids", ElementRule::kInt64, 1, {{kBatch, 1, 0}}},
    {"candidate_ids", ElementRule::kInt64, 3, {{kBatch, 1, 0}, {kBlock, 1, -1}, {kCandidates, 1, 0}}},
    {"token_table", ElementRule::kCompute, 2, {{kVocab, 1, 0}, {kMessage, 2, 0}}},
    {"write_weight", ElementRule::kCompute, 2, {{kHidden, 1, 0}, {kMessage, 1, 0}}},
    {"norm_weight", ElementRule::kCompute, 1, {{kHidden, 1, 0}}},
    {"lm_head", ElementRule::kCompute, 2, {{kVocab, 1, 0}, {kHidden, 1, 0}}},
};
inline constexpr Operand kTransitionScoresOutputs[] = {
    {"transition_scores", ElementRule::kFloat32, 4, {{kBatch, 1, 0}, {kBlock, 1, -1}, {kCandidates, 1, 0}, {kCandidates, 1, 0}}},
};
inline constexpr char const* kTransitionScoresAttributes[] = {"eps"};
inline constexpr OpSchema kTransitionScoresSchema{"TransitionScores", 8, kTransitionScoresInputs, 1, kTransitionScoresOutputs, 1, kTransitionScoresAttributes};

// Walks the candidate lattice: greedy where temperature is 0, by inverse CDF elsewhere; returns the rows it sampled from.
inline constexpr Operand kLatticeWalkInputs[] = {
    {"transition_scores", ElementRule::kFloat32, 4, {{kBatch, 1, 0}, {kBlock, 1, -1}, {kCandidates, 1, 0}, {kCandidates, 1, 0}}},
    {"candidate_ids", ElementRule::kInt64, 3, {{kBatch, 1, 0}, {kBlock, 1, -1}, {kCandidates, 1, 0}}},
    {"temperature", ElementRule::kFloat32, 1, {{kBatch, 1, 0}}},
    {"uniforms", ElementRule::kFloat32, 2, {{kBatch, 1, 0}, {kBlock, 1, -1}}},
};
inline constexpr Operand kLatticeWalkOutputs[] = {
    {"tokens", ElementRule::kInt64, 2, {{kBatch, 1, 0}, {kBlock, 1, -1}}},
    {"q", ElementRule::kFloat32, 3, {{kBatch, 1, 0}, {kBlock, 1, -1}, {kCandidates, 1, 0}}},
};
inline constexpr OpSchema kLatticeWalkSchema{"LatticeWalk", 4, kLatticeWalkInputs, 2, kLatticeWalkOutputs, 0, nullptr};

inline constexpr OpSchema const* kOps[] = {&kAdjacentInjectionSchema, &kTransitionScoresSchema, &kLatticeWalkSchema};

} // namespace dspine
