// SPDX-License-Identifier: Apache-2.0
// routing/routers.hpp: every router that the registry names.
#pragma once

#include "moe/routing/any_router.hpp"
#include "moe/routing/biased_topk.hpp"
#include "moe/routing/external.hpp"
#include "moe/routing/grouped_topk.hpp"
#include "moe/routing/hash_topk.hpp"
#include "moe/routing/llama4.hpp"
#include "moe/routing/sigmoid_topk.hpp"
#include "moe/routing/softmax_topk.hpp"
#include "moe/routing/sparsemixer.hpp"
#include "moe/routing/topk_softmax.hpp"
#include "moe/routing/zero_expert.hpp"
