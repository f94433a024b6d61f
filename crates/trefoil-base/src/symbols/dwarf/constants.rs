//! The numbers of DWARF that are used here, by the names of the standard.
//!
//! Names with `GNU` are from before DWARF 5 standardized the same.

pub(super) const DW_TAG_INLINED_SUBROUTINE: u16 = 0x1d;
pub(super) const DW_TAG_SUBPROGRAM: u16 = 0x2e;
pub(super) const DW_TAG_PARTIAL_UNIT: u16 = 0x3c;
pub(super) const DW_TAG_TYPE_UNIT: u16 = 0x41;

pub(super) const DW_UT_TYPE: u8 = 0x02;
pub(super) const DW_UT_PARTIAL: u8 = 0x03;
pub(super) const DW_UT_SKELETON: u8 = 0x04;
pub(super) const DW_UT_SPLIT_COMPILE: u8 = 0x05;
pub(super) const DW_UT_COMPILE: u8 = 0x01;

pub(super) const DW_AT_NAME: u16 = 0x03;
pub(super) const DW_AT_STMT_LIST: u16 = 0x10;
pub(super) const DW_AT_LOW_PC: u16 = 0x11;
pub(super) const DW_AT_HIGH_PC: u16 = 0x12;
pub(super) const DW_AT_COMP_DIR: u16 = 0x1b;
pub(super) const DW_AT_ABSTRACT_ORIGIN: u16 = 0x31;
pub(super) const DW_AT_SPECIFICATION: u16 = 0x47;
pub(super) const DW_AT_RANGES: u16 = 0x55;
pub(super) const DW_AT_CALL_FILE: u16 = 0x58;
pub(super) const DW_AT_CALL_LINE: u16 = 0x59;
pub(super) const DW_AT_LINKAGE_NAME: u16 = 0x6e;
pub(super) const DW_AT_STR_OFFSETS_BASE: u16 = 0x72;
pub(super) const DW_AT_ADDR_BASE: u16 = 0x73;
pub(super) const DW_AT_RNGLISTS_BASE: u16 = 0x74;
pub(super) const DW_AT_DWO_NAME: u16 = 0x76;
pub(super) const DW_AT_MIPS_LINKAGE_NAME: u16 = 0x2007;
pub(super) const DW_AT_GNU_DWO_NAME: u16 = 0x2130;
pub(super) const DW_AT_GNU_DWO_ID: u16 = 0x2131;
pub(super) const DW_AT_GNU_RANGES_BASE: u16 = 0x2132;
pub(super) const DW_AT_GNU_ADDR_BASE: u16 = 0x2133;

pub(super) const DW_FORM_ADDR: u16 = 0x01;
pub(super) const DW_FORM_BLOCK2: u16 = 0x03;
pub(super) const DW_FORM_BLOCK4: u16 = 0x04;
pub(super) const DW_FORM_DATA2: u16 = 0x05;
pub(super) const DW_FORM_DATA4: u16 = 0x06;
pub(super) const DW_FORM_DATA8: u16 = 0x07;
pub(super) const DW_FORM_STRING: u16 = 0x08;
pub(super) const DW_FORM_BLOCK: u16 = 0x09;
pub(super) const DW_FORM_BLOCK1: u16 = 0x0a;
pub(super) const DW_FORM_DATA1: u16 = 0x0b;
pub(super) const DW_FORM_FLAG: u16 = 0x0c;
pub(super) const DW_FORM_SDATA: u16 = 0x0d;
pub(super) const DW_FORM_STRP: u16 = 0x0e;
pub(super) const DW_FORM_UDATA: u16 = 0x0f;
pub(super) const DW_FORM_REF_ADDR: u16 = 0x10;
pub(super) const DW_FORM_REF1: u16 = 0x11;
pub(super) const DW_FORM_REF2: u16 = 0x12;
pub(super) const DW_FORM_REF4: u16 = 0x13;
pub(super) const DW_FORM_REF8: u16 = 0x14;
pub(super) const DW_FORM_REF_UDATA: u16 = 0x15;
pub(super) const DW_FORM_INDIRECT: u16 = 0x16;
pub(super) const DW_FORM_SEC_OFFSET: u16 = 0x17;
pub(super) const DW_FORM_EXPRLOC: u16 = 0x18;
pub(super) const DW_FORM_FLAG_PRESENT: u16 = 0x19;
pub(super) const DW_FORM_STRX: u16 = 0x1a;
pub(super) const DW_FORM_ADDRX: u16 = 0x1b;
pub(super) const DW_FORM_REF_SUP4: u16 = 0x1c;
pub(super) const DW_FORM_STRP_SUP: u16 = 0x1d;
pub(super) const DW_FORM_DATA16: u16 = 0x1e;
pub(super) const DW_FORM_LINE_STRP: u16 = 0x1f;
pub(super) const DW_FORM_REF_SIG8: u16 = 0x20;
pub(super) const DW_FORM_IMPLICIT_CONST: u16 = 0x21;
pub(super) const DW_FORM_LOCLISTX: u16 = 0x22;
pub(super) const DW_FORM_RNGLISTX: u16 = 0x23;
pub(super) const DW_FORM_REF_SUP8: u16 = 0x24;
pub(super) const DW_FORM_STRX1: u16 = 0x25;
pub(super) const DW_FORM_STRX2: u16 = 0x26;
pub(super) const DW_FORM_STRX3: u16 = 0x27;
pub(super) const DW_FORM_STRX4: u16 = 0x28;
pub(super) const DW_FORM_ADDRX1: u16 = 0x29;
pub(super) const DW_FORM_ADDRX2: u16 = 0x2a;
pub(super) const DW_FORM_ADDRX3: u16 = 0x2b;
pub(super) const DW_FORM_ADDRX4: u16 = 0x2c;
pub(super) const DW_FORM_GNU_ADDR_INDEX: u16 = 0x1f01;
pub(super) const DW_FORM_GNU_STR_INDEX: u16 = 0x1f02;
pub(super) const DW_FORM_GNU_REF_ALT: u16 = 0x1f20;
pub(super) const DW_FORM_GNU_STRP_ALT: u16 = 0x1f21;

pub(super) const DW_RLE_END_OF_LIST: u8 = 0;
pub(super) const DW_RLE_BASE_ADDRESSX: u8 = 1;
pub(super) const DW_RLE_STARTX_ENDX: u8 = 2;
pub(super) const DW_RLE_STARTX_LENGTH: u8 = 3;
pub(super) const DW_RLE_OFFSET_PAIR: u8 = 4;
pub(super) const DW_RLE_BASE_ADDRESS: u8 = 5;
pub(super) const DW_RLE_START_END: u8 = 6;
pub(super) const DW_RLE_START_LENGTH: u8 = 7;

pub(super) const DW_LNS_COPY: u8 = 1;
pub(super) const DW_LNS_ADVANCE_PC: u8 = 2;
pub(super) const DW_LNS_ADVANCE_LINE: u8 = 3;
pub(super) const DW_LNS_SET_FILE: u8 = 4;
pub(super) const DW_LNS_SET_COLUMN: u8 = 5;
pub(super) const DW_LNS_NEGATE_STMT: u8 = 6;
pub(super) const DW_LNS_SET_BASIC_BLOCK: u8 = 7;
pub(super) const DW_LNS_CONST_ADD_PC: u8 = 8;
pub(super) const DW_LNS_FIXED_ADVANCE_PC: u8 = 9;
pub(super) const DW_LNS_SET_PROLOGUE_END: u8 = 10;
pub(super) const DW_LNS_SET_EPILOGUE_BEGIN: u8 = 11;
pub(super) const DW_LNS_SET_ISA: u8 = 12;

pub(super) const DW_LNE_END_SEQUENCE: u8 = 1;
pub(super) const DW_LNE_SET_ADDRESS: u8 = 2;
pub(super) const DW_LNE_DEFINE_FILE: u8 = 3;

pub(super) const DW_LNCT_PATH: u64 = 1;
pub(super) const DW_LNCT_DIRECTORY_INDEX: u64 = 2;

pub(super) const DW_SECT_INFO: u32 = 1;
pub(super) const DW_SECT_ABBREV: u32 = 3;
pub(super) const DW_SECT_STR_OFFSETS: u32 = 6;
/// In version 5. In version 2 this is `DW_SECT_MACRO`.
pub(super) const DW_SECT_RNGLISTS: u32 = 8;
