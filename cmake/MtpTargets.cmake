# What all our targets have in common: warnings, sanitizers, the instruction set.
add_library(mtp_options INTERFACE)
target_compile_definitions(mtp_options INTERFACE _GNU_SOURCE)
target_compile_options(mtp_options INTERFACE
  -Wall -Wextra -Wpedantic -Wshadow -Wconversion -Wno-psabi
  $<$<COMPILE_LANGUAGE:C>:-Wstrict-prototypes -Wmissing-prototypes>
  -fno-math-errno -fno-trapping-math)
if(MTP_WERROR)
  target_compile_options(mtp_options INTERFACE -Werror)
endif()
if(MTP_NATIVE)
  target_compile_options(mtp_options INTERFACE -march=native)
endif()
if(MTP_SANITIZE STREQUAL "address")
  target_compile_options(mtp_options INTERFACE -fsanitize=address,undefined -fno-sanitize-recover=all -fno-omit-frame-pointer)
  target_link_options(mtp_options INTERFACE -fsanitize=address,undefined)
elseif(MTP_SANITIZE STREQUAL "thread")
  target_compile_options(mtp_options INTERFACE -fsanitize=thread -fno-omit-frame-pointer)
  target_link_options(mtp_options INTERFACE -fsanitize=thread)
endif()
