// SPDX-License-Identifier: Apache-2.0
// tests/without_member.hpp: how a test makes a policy that lacks one member. Not in archetypes.hpp, which is precompiled without MOE_FIXED.
#pragma once

// MOE_WITHOUT(Name, Base, member): Name is Base without a member: a deleted function hides it, or a private type if the member is a type.
// MOE_CHANGE_WITHOUT: the same as a template on the base. With MOE_FIXED nothing is hidden.
#ifdef MOE_FIXED
#define MOE_HIDE(member)
#define MOE_HIDE_TYPE(member)
#else
#define MOE_HIDE(member) void member() = delete;
#define MOE_HIDE_TYPE(member) \
 private:                     \
  using member = void;
#endif
#define MOE_WITHOUT(Name, Base, member) \
  struct Name : Base {                  \
    using Hidden = Base;                \
    using Hidden::Hidden;               \
    MOE_HIDE(member)                    \
  }
#define MOE_WITHOUT_TYPE(Name, Base, member) \
  struct Name : Base {                       \
    using Hidden = Base;                     \
    using Hidden::Hidden;                    \
    MOE_HIDE_TYPE(member)                    \
  }
