// SPDX-License-Identifier: Apache-2.0
// runner/runner.hpp: the block of a model: a layer and what surrounds it, as one static type. A part that a block does not have costs
// nothing. The class is in runner/declaration.hpp.
#pragma once

#include "moe/runner/around_shared.hpp"
#include "moe/runner/capture.hpp"
#include "moe/runner/construction.hpp"
#include "moe/runner/declaration.hpp"
#include "moe/runner/finish.hpp"
#include "moe/runner/forward.hpp"
#include "moe/runner/validate.hpp"
