package capacity

// RefusesSSHKey says what is wrong with the text of a public key.
var RefusesSSHKey = refuses
