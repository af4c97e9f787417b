// One build of the kernel for the instruction set that the compiler's flags name; BUILD is its name.
#include "backward.h"
#include "decode.h"
#include "program.h"
#include "program_decode.h"
#include "stages.h"

#define JOIN_(a, b) a##b
#define JOIN(a, b) JOIN_(a, b)
#define TEXT_(a) #a
#define TEXT(a) TEXT_(a)

extern "C" const Build JOIN(dape_build_, BUILD);
extern "C" const Build JOIN(dape_build_, BUILD) = {
    TEXT(BUILD),
    {shared_floats, forward_scratch, no_tickets, no_sums, no_floats, forward_units, prepare, forward_run, nothing},
    {shared_floats, backward_scratch, backward_tickets, backward_sums, backward_sums_floats, backward_units, prepare,
     backward_run, backward_finish},
    {shared_floats, decode_scratch, no_tickets, no_sums, no_floats, decode_units, prepare_weights, decode_run, decode_finish},
    {program_shared, program_forward_scratch, no_tickets, no_sums, no_floats, forward_units, program_prepare,
     program_forward_run, nothing},
    {program_shared, program_backward_scratch, program_backward_tickets, program_backward_sums,
     program_backward_sums_floats, program_backward_units, program_prepare, program_backward_run,
     program_backward_finish},
    {program_shared, program_decode_scratch, no_tickets, no_sums, no_floats, program_decode_units, prepare_stages,
     program_decode_run, program_decode_finish},
    run_stage,
};
