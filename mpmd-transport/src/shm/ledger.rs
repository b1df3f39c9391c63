//! The owner's record of its lent memory: which process may read which part.
//!
//! Every loan of this process's memory is entered here, also those by which other processes re-lend
//! it. So a loan never depends on another one: each ends by itself when its borrower returns it.
//!
//! A borrower may return memory that another process has re-lent to it, and this process may read
//! that before the re-lender's note. The note is in the re-lender's ring by then: it was written
//! before the message that lent the memory. So a note that names an unknown loan waits until all
//! rings were read once more.

use std::collections::HashMap;

use super::note::{LoanId, ReturnNote};
use super::ring::{Consumer, Corrupt};
use crate::transport::Ticket;
use mpmd_memory::SharedBuffer;
use mpmd_proto::wire::ProcessId;

/// Number of new loans after which the return rings are read. A loan causes at most two notes from
/// each borrower, and a ring has space for more than twice that number.
const READ_AFTER: usize = 64;

/// All loans of this process's memory to peers. Each borrower reports returned loans in a ring in
/// shared memory, its return ring.
pub(super) struct LoanLedger {
    /// The loans to each process, by process; `None` for processes that this transport does not
    /// reach.
    accounts: Vec<Option<Account>>,
    /// Number of loans made since the return rings were last read.
    unread: usize,
    /// Number of times that the return rings were read.
    round: u64,
}

/// The loans to one borrower.
struct Account {
    open: HashMap<LoanId, OpenLoan>,
    bytes: u64,
    /// Number of open loans that the borrower must copy and then return. This process waits for
    /// their return.
    copied: usize,
    /// Numbers of device segments that the borrower has reported as closed.
    closed: Vec<u32>,
    /// The number of the last loan that the borrower got from each lender that lends it no more.
    last: HashMap<ProcessId, u64>,
    /// The ring in which the borrower reports returned loans.
    returns: Consumer,
    /// Notes that name a loan which is not entered yet, in the order in which they were read.
    early: Vec<EarlyNote>,
    /// The fault found in the return ring, if any. After a fault, the ring is not read any more.
    corrupt: Option<Corrupt>,
    /// True once this process accepts no more messages from the borrower.
    has_ended: bool,
    /// True once the borrower's process has provably exited and its last notes have been read.
    has_exited: bool,
}

/// A note that names a loan which is not entered yet.
struct EarlyNote {
    /// Value of [`LoanLedger::round`] when the note was read.
    round: u64,
    note: ReturnNote,
}

/// A loan that the borrower has not returned completely.
struct OpenLoan {
    buffer: SharedBuffer,
    /// The ticket that ends when the loan is returned, or `Ticket::NONE`.
    ticket: Ticket,
    is_copied: bool,
    /// Number of messages from the borrower that contained parts of this memory, so far.
    messages_taken: u64,
    /// Number of such messages that the borrower has sent in all. `None` until it returns the loan.
    messages_at_return: Option<u64>,
}

/// A loan that has ended. Drop it only while holding no lock, because its memory may go back to a
/// pool.
pub(super) struct EndedLoan {
    pub(super) buffer: SharedBuffer,
    pub(super) ticket: Ticket,
}

/// The payload of a message in which a borrower sent a part of this process's memory back.
pub(super) struct TakenPart {
    /// The part of the memory; `None` if the borrower has no such loan.
    pub(super) part: Option<SharedBuffer>,
    /// Loans that ended when the part was taken.
    pub(super) ended: Vec<EndedLoan>,
}

/// The loans to a borrower from which no more messages are accepted.
#[derive(Default)]
pub(super) struct BorrowerEnd {
    /// Loans that were returned, and were kept only because messages with their parts were missing.
    pub(super) ended: Vec<EndedLoan>,
    /// Tickets of all other open loans. Their memory stays lent.
    pub(super) tickets: Vec<Ticket>,
}

impl LoanLedger {
    /// Creates an empty ledger. `returns` contains each process's return ring, by process.
    pub(super) fn new(returns: impl IntoIterator<Item = Option<Consumer>>) -> Self {
        let accounts = returns
            .into_iter()
            .map(|ring| ring.map(Account::new))
            .collect();
        Self {
            accounts,
            unread: 0,
            round: 0,
        }
    }

    /// Enters a loan of this process's memory to the process `to`. Call it before the borrower can
    /// return the loan. Returns true if the return rings should be [read](Self::collect) now.
    pub(super) fn lend(
        &mut self,
        to: ProcessId,
        loan: LoanId,
        bytes: SharedBuffer,
        ticket: Ticket,
        is_copied: bool,
    ) -> bool {
        if let Some(account) = self.account(to) {
            account.enter(loan, bytes, ticket, is_copied);
        }

        self.unread += 1;
        self.unread >= READ_AFTER
    }

    /// Reads all return rings, and returns the loans that have ended.
    pub(super) fn collect(&mut self) -> Vec<EndedLoan> {
        self.unread = 0;
        let mut ended = Vec::new();
        // One ring's worth of each borrower at most: a borrower may go on writing.
        let mut left: Vec<usize> = self
            .accounts
            .iter()
            .map(|account| account.as_ref().map_or(0, |account| account.returns.most()))
            .collect();

        loop {
            self.round += 1;
            let mut is_cut = false;
            for (borrower, left) in left.iter_mut().enumerate() {
                is_cut |= self.read(ProcessId(borrower as u32), left, &mut ended);
            }

            while self.retry(&mut ended) {}
            // If a ring was not read to its end, the missing notes may be in the rest.
            if is_cut {
                return ended;
            }

            let round = self.round;
            let mut has_early = false;
            for account in self.accounts.iter_mut().flatten() {
                // Wrong numbers: since they were read, all rings were read once more.
                account.early.retain(|early| early.round == round);
                has_early |= !account.early.is_empty();
            }
            if !has_early {
                return ended;
            }
        }
    }

    /// Reads at most `left` notes from a borrower's return ring. Returns true if unread notes
    /// remain.
    fn read(&mut self, borrower: ProcessId, left: &mut usize, ended: &mut Vec<EndedLoan>) -> bool {
        let round = self.round;
        loop {
            let Some(account) = self.account(borrower) else {
                return false;
            };
            if account.corrupt.is_some() {
                return false;
            }

            if *left == 0 {
                return !account.returns.is_empty();
            }

            let note = match account.returns.pop(ReturnNote::read) {
                Ok(Some(note)) => note,
                Ok(None) => return false,
                Err(nonsense) => {
                    account.corrupt = Some(nonsense);
                    return false;
                }
            };

            *left -= 1;

            // Any other record in this ring is ignored. Notes stay in order.
            if let Some(note) = note {
                let is_first = account.early.is_empty();
                if !(is_first && self.take(borrower, note, ended))
                    && let Some(account) = self.account(borrower)
                {
                    account.early.push(EarlyNote { round, note });
                }
            }
        }
    }

    /// Retries all notes that named a loan which was not entered. Returns true if at least one
    /// succeeded.
    fn retry(&mut self, ended: &mut Vec<EndedLoan>) -> bool {
        let mut any = false;
        for borrower in 0..self.accounts.len() {
            let borrower = ProcessId(borrower as u32);
            let early = self
                .account(borrower)
                .map(|account| std::mem::take(&mut account.early));
            let mut early = early.unwrap_or_default();
            let before = early.len();
            early.retain(|early| !self.take(borrower, early.note, ended));
            any |= early.len() < before;
            if let Some(account) = self.account(borrower) {
                account.early = early;
            }
        }
        any
    }

    /// Applies a borrower's note. If the note names a loan that is not entered, does nothing and
    /// returns false.
    fn take(&mut self, borrower: ProcessId, note: ReturnNote, ended: &mut Vec<EndedLoan>) -> bool {
        let Some(account) = self.account(borrower) else {
            return true;
        };

        match note {
            ReturnNote::Returned { loan, to_owner } => {
                let Some(open) = account.open.get_mut(&loan) else {
                    return false;
                };
                open.messages_at_return.get_or_insert(to_owner);
                ended.extend(account.end_if_over(loan));
            }
            ReturnNote::PassedOn {
                loan,
                to,
                number,
                offset,
                bytes,
            } => {
                let Some(open) = account.open.get(&loan) else {
                    return false;
                };
                let part = open.buffer.part_at(offset, bytes);
                let is_copied = open.is_copied;
                let loan = LoanId {
                    lender: borrower,
                    number,
                };

                // A loan of wrong numbers is not entered.
                if let (Some(part), Some(account)) = (part, self.account(to))
                    && to != borrower
                    && account.may_get(loan)
                {
                    account.enter(loan, part, Ticket::NONE, is_copied);
                }
            }
            ReturnNote::Last(LoanId { lender, number }) => {
                account.last.insert(lender, number);
                let lost = |loan: &LoanId| loan.lender == lender && loan.number > number;
                let lost: Vec<LoanId> = account.open.keys().copied().filter(lost).collect();
                ended.extend(lost.into_iter().filter_map(|loan| account.end(loan)));
            }
            ReturnNote::Closed(segment) => account.closed.push(segment),
        }
        true
    }

    /// Returns the part of this process's own memory that the borrower `from` has sent back in a
    /// message.
    pub(super) fn take_part(
        &mut self,
        from: ProcessId,
        loan: LoanId,
        offset: u64,
        bytes: u64,
    ) -> TakenPart {
        let is_known = self
            .account(from)
            .is_some_and(|account| account.open.contains_key(&loan));
        let mut ended = if is_known { Vec::new() } else { self.collect() };

        let Some(account) = self.account(from) else {
            return TakenPart { part: None, ended };
        };
        let Some(open) = account.open.get_mut(&loan) else {
            return TakenPart { part: None, ended };
        };

        let part = open.buffer.part_at(offset, bytes);
        open.messages_taken += 1;
        ended.extend(account.end_if_over(loan));
        TakenPart { part, ended }
    }

    /// Records that no more messages from a borrower are accepted. Ends the loans that it has
    /// returned, and collects the tickets of all others. The caller fails these tickets; their
    /// memory stays lent.
    pub(super) fn close_account(&mut self, borrower: ProcessId) -> BorrowerEnd {
        let Some(account) = self.account(borrower) else {
            return BorrowerEnd::default();
        };
        account.has_ended = true;

        let returned: Vec<LoanId> = account
            .open
            .iter()
            .filter(|(_, open)| open.messages_at_return.is_some())
            .map(|(loan, _)| *loan)
            .collect();
        let ended = returned
            .into_iter()
            .filter_map(|loan| account.end(loan))
            .collect();
        BorrowerEnd {
            ended,
            tickets: self.take_tickets(borrower),
        }
    }

    /// Records that a borrower's process has provably exited. Ends all loans to it once its last
    /// notes are read. May be called repeatedly. Loans to processes to which the borrower re-lent
    /// memory stay open.
    ///
    /// After a fault in the borrower's return ring, only loans that it returned before the fault
    /// end. Its notes about re-lent memory may be lost.
    pub(super) fn note_exit(&mut self, borrower: ProcessId) -> Vec<EndedLoan> {
        let is_new = self
            .account(borrower)
            .is_some_and(|account| !account.has_exited && account.corrupt.is_none());
        if !is_new {
            return Vec::new();
        }

        let mut ended = self.collect();
        if let Some(account) = self.account(borrower)
            && account.corrupt.is_none()
            && account.returns.is_empty()
            && account.early.is_empty()
        {
            account.has_exited = true;
            ended.extend(account.open.drain().map(|(_, open)| EndedLoan {
                buffer: open.buffer,
                ticket: open.ticket,
            }));
            account.bytes = 0;
            account.copied = 0;
        }
        ended
    }

    /// [Retires](SharedBuffer::retire) all lent memory, so that it is never reused. The ledger no
    /// longer learns of returned loans.
    pub(super) fn retire(&mut self) {
        for account in self.accounts.iter_mut().flatten() {
            account
                .open
                .drain()
                .for_each(|(_, open)| open.buffer.retire());
            account.bytes = 0;
            account.copied = 0;
        }
    }

    /// Removes and returns the tickets of all loans to a borrower, so that no caller waits for the
    /// end of these loans. The memory stays lent.
    pub(super) fn take_tickets(&mut self, borrower: ProcessId) -> Vec<Ticket> {
        let Some(account) = self.account(borrower) else {
            return Vec::new();
        };

        account.copied = 0;
        let tickets = account.open.values_mut().map(|open| {
            open.is_copied = false;
            std::mem::replace(&mut open.ticket, Ticket::NONE)
        });
        tickets.filter(|ticket| *ticket != Ticket::NONE).collect()
    }

    /// Returns the numbers of the device segments that a borrower has reported as closed. Each
    /// number is returned once.
    pub(super) fn take_closed(&mut self, borrower: ProcessId) -> Vec<u32> {
        self.account(borrower)
            .map(|account| std::mem::take(&mut account.closed))
            .unwrap_or_default()
    }

    /// Returns the fault found in a borrower's return ring, if any.
    pub(super) fn corrupt(&self, borrower: ProcessId) -> Option<&Corrupt> {
        self.accounts
            .get(borrower.index())?
            .as_ref()?
            .corrupt
            .as_ref()
    }

    /// Returns true if this process waits for a borrower to copy and return a loan.
    pub(super) fn is_awaited(&self) -> bool {
        self.accounts
            .iter()
            .flatten()
            .any(|account| account.copied > 0)
    }

    /// Returns true if the return rings should be [read](Self::collect): an awaited loan may have
    /// been returned, or a ring is half full.
    pub(super) fn has_news(&self) -> bool {
        self.accounts.iter().flatten().any(|account| {
            let returns = &account.returns;
            account.corrupt.is_none()
                && (returns.is_half_full() || (account.copied > 0 && !returns.is_empty()))
        })
    }

    /// Returns the number of bytes that are lent to a borrower now.
    pub(super) fn bytes(&self, borrower: ProcessId) -> u64 {
        let account = self.accounts.get(borrower.index()).and_then(Option::as_ref);
        account.map_or(0, |account| account.bytes)
    }

    /// Returns the number of open loans to all borrowers.
    #[cfg(test)]
    pub(super) fn open(&self) -> usize {
        self.accounts
            .iter()
            .flatten()
            .map(|account| account.open.len())
            .sum()
    }

    fn account(&mut self, borrower: ProcessId) -> Option<&mut Account> {
        self.accounts.get_mut(borrower.index())?.as_mut()
    }
}

impl Account {
    fn new(returns: Consumer) -> Self {
        Self {
            open: HashMap::new(),
            bytes: 0,
            copied: 0,
            closed: Vec::new(),
            last: HashMap::new(),
            returns,
            early: Vec::new(),
            corrupt: None,
            has_ended: false,
            has_exited: false,
        }
    }

    /// Returns true if loan `loan` may still be entered: it is not open yet, and has not been lost.
    fn may_get(&self, loan: LoanId) -> bool {
        let is_lost = self
            .last
            .get(&loan.lender)
            .is_some_and(|last| loan.number > *last);
        !self.has_exited && !is_lost && !self.open.contains_key(&loan)
    }

    /// Enters a loan of `buffer` to this borrower.
    fn enter(&mut self, loan: LoanId, buffer: SharedBuffer, ticket: Ticket, is_copied: bool) {
        // Nothing waits for a borrower after the end of its connection.
        let is_copied = is_copied && !self.has_ended;
        self.bytes += buffer.len() as u64;
        self.copied += usize::from(is_copied);
        self.open.insert(
            loan,
            OpenLoan {
                buffer,
                ticket,
                is_copied,
                messages_taken: 0,
                messages_at_return: None,
            },
        );
    }

    /// Removes a loan and returns it as ended. Returns `None` if the borrower has no such loan.
    fn end(&mut self, loan: LoanId) -> Option<EndedLoan> {
        let OpenLoan {
            buffer,
            ticket,
            is_copied,
            ..
        } = self.open.remove(&loan)?;
        self.bytes -= buffer.len() as u64;
        self.copied -= usize::from(is_copied);
        Some(EndedLoan { buffer, ticket })
    }

    /// Ends a loan that was returned, unless a message with a part of it has not been taken yet.
    fn end_if_over(&mut self, loan: LoanId) -> Option<EndedLoan> {
        let open = self.open.get(&loan)?;
        // invariant: lent-is-not-reused
        let is_over = open
            .messages_at_return
            .is_some_and(|posted| self.has_ended || open.messages_taken >= posted);
        if is_over { self.end(loan) } else { None }
    }
}
