package ledger

import "github.com/gpuaas/gpuaas/pkg/fault"

// Codes of the faults of this package.
const (
	// codeAcceleratorPartFixed: the app instance is billed for another part of a GPU.
	codeAcceleratorPartFixed fault.Code = "accelerator_part_fixed"
	// CodeAmountInvalid: the amount is out of range or cannot be read.
	CodeAmountInvalid fault.Code = "amount_invalid"
	// codeIDInvalid: an id in the filter is malformed.
	codeIDInvalid fault.Code = "id_invalid"
	// codeInsufficientFunds: the org's wallet does not cover the request.
	codeInsufficientFunds fault.Code = "insufficient_funds"
	// codePriceCurrencyMissing: a meter has prices, but none in the currency of the org's wallet.
	codePriceCurrencyMissing fault.Code = "price_currency_missing"
	// codePriceExists: a price of the same scope begins at the same time.
	codePriceExists fault.Code = "price_exists"
	// codePriceInThePast: a price cannot begin in the past.
	codePriceInThePast fault.Code = "price_in_the_past"
	// codePriceInvalid: the price is out of range.
	codePriceInvalid fault.Code = "price_invalid"
	// codePriceUnitInvalid: the meter cannot be priced per this unit.
	codePriceUnitInvalid fault.Code = "price_unit_invalid"
	// codeSegmentNumbering: the records of a usage segment are not numbered consecutively.
	codeSegmentNumbering fault.Code = "segment_numbering"
	// codeSubjectClosed: the member has ended and gets no further lease.
	codeSubjectClosed fault.Code = "subject_closed"
	// codeSubjectKind: the subject is of the wrong kind.
	codeSubjectKind fault.Code = "subject_kind"
	// codeSubjectNotFound: nothing of this id is billed.
	codeSubjectNotFound fault.Code = "subject_not_found"
	// codeSubjectOpen: the subject must be closed first.
	codeSubjectOpen fault.Code = "subject_open"
	// codeWrongNode: the member belongs to another node.
	codeWrongNode fault.Code = "wrong_node"
)
